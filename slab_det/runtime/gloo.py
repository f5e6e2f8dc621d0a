"""Lets mmengine train distributed on the CPU, with gloo."""

import warnings
from typing import Any

import mmengine.dist.utils
import mmengine.runner.runner
import torch.distributed
from mmengine.device import get_device
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS
from torch import nn


def install_cpu_training() -> None:
    """Lets ``--launcher pytorch`` use the CPU if there is no accelerator.

    Patches mmengine's ``_init_dist_pytorch``, which sets a CUDA device, and ``Runner.wrap_model``, which passes
    ``device_ids``.
    """
    if get_device() == 'cpu':
        mmengine.dist.utils._init_dist_pytorch = init_gloo
        MODEL_WRAPPERS.register_module('MMDistributedDataParallel', force=True, module=CpuDataParallel)
        # The runner uses this name, not the registry, if the config has no model_wrapper_cfg.
        mmengine.runner.runner.MMDistributedDataParallel = CpuDataParallel


def init_gloo(backend: str, init_backend: str = 'torch', **kwargs: Any) -> None:
    """Starts the process group with gloo; ``backend`` and ``init_backend`` of the config are ignored."""
    if backend != 'gloo':
        warnings.warn(f'There is no GPU: this run uses the CPU, with gloo instead of {backend}.', stacklevel=2)
    torch.distributed.init_process_group('gloo', **kwargs)


class CpuDataParallel(MMDistributedDataParallel):
    """MMDistributedDataParallel that ignores ``device_ids``, which the runner always passes."""

    def __init__(self, module: nn.Module, device_ids: list[int] | None = None, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)
