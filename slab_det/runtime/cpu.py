"""Training on a machine without accelerator: processes that use gloo, and mixed precision in bfloat16."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mmengine.dist.utils
import mmengine.runner.runner
import torch
import torch.distributed
from mmengine.device import get_device
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from mmengine.registry import MODEL_WRAPPERS, OPTIM_WRAPPERS
from torch import nn

from slab_det.runtime.errors import SlabDetError


def install_cpu_training() -> None:
    """Lets ``--launcher pytorch`` and ``--amp`` use the CPU where there is no accelerator.

    Patches ``_init_dist_pytorch``, which sets a CUDA device, ``Runner.wrap_model``, which passes ``device_ids``, and
    ``AmpOptimWrapper.__init__``, which asserts an accelerator:
    https://github.com/open-mmlab/mmengine/blob/main/mmengine/dist/utils.py
    https://github.com/open-mmlab/mmengine/blob/main/mmengine/runner/runner.py
    https://github.com/open-mmlab/mmengine/blob/main/mmengine/optim/optimizer/amp_optimizer_wrapper.py
    """
    if get_device() == 'cpu':
        mmengine.dist.utils._init_dist_pytorch = init_gloo
        MODEL_WRAPPERS.register_module('MMDistributedDataParallel', force=True, module=CpuDataParallel)
        # The runner calls the class by name where the config names no wrapper.
        mmengine.runner.runner.MMDistributedDataParallel = CpuDataParallel
        OPTIM_WRAPPERS.register_module('AmpOptimWrapper', force=True, module=CpuAmpOptimWrapper)


def init_gloo(backend: str, init_backend: str = 'torch', **kwargs: Any) -> None:
    """Starts the process group with gloo, whatever ``backend`` and ``init_backend`` the config names."""
    if backend != 'gloo':
        warnings.warn(
            f'There is no GPU: the processes of this run use the CPU, and gloo in place of {backend}.', stacklevel=2
        )
    torch.distributed.init_process_group('gloo', **kwargs)


class CpuDataParallel(MMDistributedDataParallel):
    """mmengine's wrapper, without the ``device_ids`` that the runner always passes."""

    def __init__(self, module: nn.Module, device_ids: list[int] | None = None, **kwargs: Any) -> None:
        super().__init__(module, **kwargs)


class CpuAmpOptimWrapper(OptimWrapper):
    """Autocast to bfloat16, which has the range of float32: ``loss_scale`` is not used.

    Raises:
        SlabDetError: If ``dtype`` is neither None nor bfloat16.
    """

    def __init__(
        self, loss_scale: str | float | dict = 'dynamic', dtype: str | torch.dtype | None = None, **kwargs: Any
    ) -> None:
        if dtype not in (None, 'bfloat16', torch.bfloat16):
            raise SlabDetError(f'AmpOptimWrapper: without a GPU training is in bfloat16; leave out dtype={dtype!r}')
        super().__init__(**kwargs)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Runs the forward under autocast, and does not synchronize gradients while they are accumulated."""
        with super().optim_context(model), torch.autocast('cpu', torch.bfloat16):
            yield
