"""Processes of a distributed run: errors, values and sums that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from mmengine.dist import all_gather_object, broadcast_object_list, get_world_size, is_main_process
from mmengine.model import BaseTTAModel, is_model_wrapper
from torch import nn

from slab_det.runtime.errors import RankError

T = TypeVar('T')


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside wrappers, distributed ones and that of test-time augmentation, or the model itself."""
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Makes an error of one process an error of all, which would wait for that process until a timeout ends them.

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


def run_on_main(function: Callable[..., T], *args: object) -> T | None:
    """Calls ``function`` in the main process alone, which must not communicate; the others get None, or its error."""
    with raise_on_all_ranks():
        return function(*args) if is_main_process() else None


def broadcast_from_main(value: T) -> T:
    """The ``value`` that the main process gives, in every process; no common file system is needed."""
    values = [value]
    broadcast_object_list(values)
    return values[0]
