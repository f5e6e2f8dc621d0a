"""Distributed runs on a machine without accelerator."""

from __future__ import annotations

import warnings
from typing import Any

import mmengine.dist.utils
import mmengine.runner.runner
import torch.distributed
from mmengine.device import get_device
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS
from torch import nn


def install_cpu_processes() -> None:
    """Runs of ``--launcher pytorch`` use the CPU and gloo where there is no accelerator.

    Mends ``_init_dist_pytorch``, which sets a CUDA device, and ``Runner.wrap_model``, which passes ``device_ids``:
    https://github.com/open-mmlab/mmengine/blob/main/mmengine/dist/utils.py
    https://github.com/open-mmlab/mmengine/blob/main/mmengine/runner/runner.py
    """
    if get_device() == 'cpu':
        mmengine.dist.utils._init_dist_pytorch = init_gloo
        MODEL_WRAPPERS.register_module('MMDistributedDataParallel', force=True, module=CpuDataParallel)
        # The runner calls the class by name where the config names no wrapper.
        mmengine.runner.runner.MMDistributedDataParallel = CpuDataParallel


def init_gloo(backend: str, init_backend: str = 'torch', **kwargs: Any) -> None:
    """Starts the process group with gloo, whatever ``backend`` and ``init_backend`` the config names."""
    if backend != 'gloo':
        warnings.warn(
            f'There is no GPU: the processes of this run use the CPU, and gloo in place of {backend}.', stacklevel=2
        )
    torch.distributed.init_process_group('gloo', **kwargs)


class CpuDataParallel(MMDistributedDataParallel):
    """mmengine's wrapper, without the ``device_ids`` that the runner always passes.

    Args:
        module: The model to wrap.
        device_ids: Not used.
        **kwargs: See :class:`mmengine.model.MMDistributedDataParallel`.
    """

    def __init__(self, module: nn.Module, device_ids: list[int] | None = None, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
