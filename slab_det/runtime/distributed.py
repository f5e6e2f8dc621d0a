"""What the processes of one run tell each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from mmengine.dist import all_gather_object, broadcast_object_list, get_world_size
from mmengine.model import is_model_wrapper
from torch import Tensor, nn

from slab_det.runtime.errors import RankError

T = TypeVar('T')


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside a distributed wrapper, or the model itself."""
    return model.module if is_model_wrapper(model) else model


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """An error of one process is one of all; otherwise they would wait for it until a timeout ends them.

    All processes enter it, and nothing in it communicates.

    Raises:
        RankError: If another process raised and this one did not.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if get_world_size() > 1:
        messages = all_gather_object(error and f'{type(error).__name__}: {error}')
        failed = {rank: message for rank, message in enumerate(messages) if message is not None}
        if error is None and failed:
            rank, message = next(iter(failed.items()))
            raise RankError(f'process {rank} of {len(messages)} failed, so this one stops too: {message}')
    if error is not None:
        raise error


def broadcast_from_main(value: T) -> T:
    """``value`` of the main process, for all of them; the others' is ignored. No file system is shared for it."""
    values = [value]
    broadcast_object_list(values)
    return values[0]


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum over all processes, which all of them get; ``values`` stays."""
    if get_world_size() > 1:
        values = values.clone()
        dist.all_reduce(values)
    return values
