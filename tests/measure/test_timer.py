"""The timer: calls in turns, and ratios to another call in the same rounds."""

from types import SimpleNamespace

import numpy as np
import pytest

from slab_det.measure import timer
from slab_det.measure.timer import compare_times, time_call, time_in_turns


def test_a_call_returns_its_result_and_is_timed_without_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def advance(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(timer, 'time', SimpleNamespace(perf_counter=lambda: clock[0], sleep=advance))
    assert time_call(lambda: advance(0.25) or 'found', pause=8.0) == (250.0, 'found')


def test_calls_take_turns_and_warm_up_rounds_do_not_count() -> None:
    order: list[str] = []
    calls = {name: lambda name=name: order.append(name) for name in 'abc'}
    times = time_in_turns(calls, rounds=3, warmup=2, progress=False)
    assert ''.join(order) == 'abccbaabccbaabc'
    assert {name: values.shape for name, values in times.items()} == dict.fromkeys('abc', (3,))


def test_ratios_are_of_the_same_round() -> None:
    # The machine is ten times slower in every second round.
    base = np.array([1.0, 10.0, 1.0, 10.0, 1.0])
    found = compare_times(base * [0.2, 0.3, 0.5, 0.4, 0.6], base)
    assert found.ratio == pytest.approx(0.4)
    assert found.quartiles == pytest.approx((0.3, 0.5)) and found.extremes == pytest.approx((0.2, 0.6))
