"""Distributed runs on machines without a GPU, which mmengine takes for granted."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mmengine.dist.utils
import mmengine.runner.runner
import torch
from mmengine.device import get_device
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS
from torch import nn

# What mmengine's init_dist calls, one per launcher.
LAUNCHERS = ('_init_dist_pytorch', '_init_dist_mpi', '_init_dist_slurm')


def install_cpu_processes() -> None:
    """Has mmengine's launchers and its model wrapper work where there is no accelerator; elsewhere nothing changes."""
    for name in LAUNCHERS:
        setattr(mmengine.dist.utils, name, with_cpu_fallback(getattr(mmengine.dist.utils, name)))
    MODEL_WRAPPERS.register_module(name=MMDistributedDataParallel.__name__, module=AnyDeviceDataParallel, force=True)
    # The runner calls it by name where the config names no wrapper.
    mmengine.runner.runner.MMDistributedDataParallel = AnyDeviceDataParallel


def with_cpu_fallback(init_dist: Callable[..., None]) -> Callable[..., None]:
    """``init_dist`` as it is where there is an accelerator, and with gloo and no device to choose where there is none.

    Args:
        init_dist: One of mmengine's ``_init_dist_*``.
    """

    @functools.wraps(init_dist)
    def init(backend: str, **kwargs: Any) -> None:
        if get_device() != 'cpu':
            init_dist(backend, **kwargs)
            return
        if backend != 'gloo':
            warnings.warn(
                f'There is no GPU: the processes of this run use the CPU, and gloo in place of {backend}.', stacklevel=2
            )
        with _no_device_to_set():
            init_dist('gloo', **kwargs)

    return init


class AnyDeviceDataParallel(MMDistributedDataParallel):
    """mmengine's wrapper, but ``device_ids``, which the runner always passes, are for models on an accelerator only.

    Args:
        module: The model to wrap, on its device.
        device_ids: The process's device; without effect for a model on the CPU.
        **kwargs: See :class:`mmengine.model.MMDistributedDataParallel`.
    """

    def __init__(self, module: nn.Module, device_ids: list[int] | None = None, **kwargs: Any) -> None:
        on_cpu = all(parameter.device.type == 'cpu' for parameter in module.parameters())
        super().__init__(module, device_ids=None if on_cpu else device_ids, **kwargs)


@contextmanager
def _no_device_to_set() -> Iterator[None]:
    set_device = torch.cuda.set_device
    torch.cuda.set_device = lambda device: None
    try:
        yield
    finally:
        torch.cuda.set_device = set_device
