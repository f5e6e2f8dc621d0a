"""The timer: calls in turns, and what each takes of the time of the first one in the same round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from slab_det.common.progress import Progress

T = TypeVar('T')
# After a call the threads of a runtime spin for a while; they must not take the cores from a call in another runtime.
PAUSE_SECONDS = 0.05


class Ratios(NamedTuple):
    """The times of a call over those of another one in the same rounds: the median, the quartiles, least and most."""

    ratio: float
    quartiles: tuple[float, float]
    extremes: tuple[float, float]


def time_call(call: Callable[[], T], device: torch.device | str = 'cpu', pause: float = 0.0) -> tuple[float, T]:
    """Waits ``pause`` seconds, then calls.

    Returns:
        The wall time in milliseconds, with the work that CUDA runs asynchronously, and what ``call`` returned.
    """
    wait = partial(torch.cuda.synchronize, device) if torch.device(device).type == 'cuda' else lambda: None
    time.sleep(pause)
    wait()
    start = time.perf_counter()
    result = call()
    wait()
    return (time.perf_counter() - start) * 1e3, result


def take_turns(names: Sequence[str], index: int) -> Sequence[str]:
    """The order of a round; each second one is reversed, so that clock speed, heat and other processes affect all."""
    return names[:: -1 if index % 2 else 1]


def time_in_turns(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 1,
    device: torch.device | str = 'cpu',
    pause: float = 0.0,
    title: str = 'Measuring',
    progress: bool = True,
) -> dict[str, np.ndarray]:
    """Times calls round by round.

    Args:
        calls: The calls, by name.
        rounds: Timed rounds.
        warmup: Untimed rounds before these.
        device: See :func:`time_call`.
        pause: Seconds before each call.
        title: What the progress bar says.
        progress: Draw a progress bar on stderr.

    Returns:
        The milliseconds of each call in each timed round, (rounds,).
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in Progress(range(warmup + rounds), title, disable=not progress):
        for name in take_turns([*calls], index):
            times[name].append(time_call(calls[name], device, pause)[0])
    return {name: np.array(values[warmup:]) for name, values in times.items()}


def compare_times(times: np.ndarray, base: np.ndarray) -> Ratios:
    """Compares the times of two calls in the same rounds."""
    least, low, ratio, high, most = np.percentile(times / base, [0, 25, 50, 75, 100]).tolist()
    return Ratios(ratio, (low, high), (least, most))
