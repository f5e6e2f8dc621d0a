"""Mixed precision on a machine without accelerator."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.device import get_device
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn

from slab_det.runtime.errors import SlabDetError


def install_cpu_amp() -> None:
    """Builds :class:`CpuAmpOptimWrapper` where a config or ``--amp`` says AmpOptimWrapper and there is no accelerator.

    Mends ``AmpOptimWrapper.__init__``, which asserts an accelerator:
    https://github.com/open-mmlab/mmengine/blob/main/mmengine/optim/optimizer/amp_optimizer_wrapper.py
    """
    if get_device() == 'cpu':
        OPTIM_WRAPPERS.register_module('AmpOptimWrapper', force=True, module=CpuAmpOptimWrapper)


class CpuAmpOptimWrapper(OptimWrapper):
    """Autocast to bfloat16, without loss scaling: bfloat16 has the range of float32.

    Args:
        loss_scale: Read on a GPU only.
        dtype: None or bfloat16.
        **kwargs: Arguments of mmengine's ``OptimWrapper``.

    Raises:
        SlabDetError: If ``dtype`` is another one.
    """

    def __init__(
        self, loss_scale: str | float | dict = 'dynamic', dtype: str | torch.dtype | None = None, **kwargs: Any
    ) -> None:
        if dtype not in (None, 'bfloat16', torch.bfloat16):
            raise SlabDetError(f'AmpOptimWrapper: without a GPU training is in bfloat16; leave out dtype={dtype!r}')
        super().__init__(**kwargs)

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Autocast, and no synchronization of gradients while they are accumulated."""
        with super().optim_context(model), torch.autocast('cpu', torch.bfloat16):
            yield
