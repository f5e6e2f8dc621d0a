"""Shares errors and values between the processes of a distributed run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from mmengine.dist import all_gather_object, broadcast_object_list, get_world_size, is_main_process
from mmengine.model import BaseTTAModel, is_model_wrapper
from torch import nn

from slab_det.common.errors import RankError

T = TypeVar('T')


def unwrap(model: nn.Module) -> nn.Module:
    """Returns the model without its wrappers for distributed training and test-time augmentation."""
    while is_model_wrapper(model) or isinstance(model, BaseTTAModel):
        model = model.module
    return model


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raises an error of one process in all processes, which would otherwise wait for it until a timeout.

    All processes must enter the block, and the block must not communicate.

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
    """Calls ``function``, which must not communicate, in the main process and returns its result; others get None."""
    with raise_on_all_ranks():
        return function(*args) if is_main_process() else None


def broadcast_from_main(value: T) -> T:
    """Returns the ``value`` of the main process in every process, without a shared file system."""
    values = [value]
    broadcast_object_list(values)
    return values[0]
