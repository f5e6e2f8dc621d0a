"""mmengine's mixed precision on a machine without GPU, where its optimizer wrapper raises."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmengine.device import get_device
from mmengine.logging import print_log
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from torch import nn

from slab_det.runtime.errors import SlabDetError


class AnyDeviceAmpOptimWrapper(AmpOptimWrapper):
    """mmengine's AmpOptimWrapper, which it is on accelerators; on a CPU autocast to bfloat16 unless ``dtype`` differs.

    bfloat16 has the range of float32 and needs no loss scaling, so that ``loss_scale`` means nothing there. float16,
    which CPUs are slow at, is scaled as on a GPU.

    Args:
        loss_scale: 'dynamic', a fixed scale, or the arguments of ``torch.amp.GradScaler``.
        dtype: What autocast casts to; None is float16 on a GPU, and bfloat16 on a CPU.
        use_fsdp: See mmengine; not on a CPU.
        **kwargs: Of ``OptimWrapper``.

    Raises:
        SlabDetError: On a CPU, for FSDP, a dtype that CPUs do not autocast to, or a ``loss_scale`` of no such kind.
    """

    def __init__(
        self,
        loss_scale: str | float | dict = 'dynamic',
        dtype: str | torch.dtype | None = None,
        use_fsdp: bool = False,
        **kwargs: Any,
    ) -> None:
        self._on_cpu = get_device() == 'cpu'
        if not self._on_cpu:
            super().__init__(loss_scale, dtype, use_fsdp, **kwargs)
            return
        # mmengine's own constructor asserts a GPU.
        OptimWrapper.__init__(self, **kwargs)
        dtype = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
        self.cast_dtype = torch.bfloat16 if dtype is None else dtype
        if use_fsdp or self.cast_dtype not in (torch.bfloat16, torch.float16):
            raise SlabDetError(
                f'AmpOptimWrapper: a CPU trains in bfloat16 or float16, without FSDP; got '
                f'dtype={dtype!r}, use_fsdp={use_fsdp}'
            )
        if loss_scale != 'dynamic' and not isinstance(loss_scale, (float, dict)):
            raise SlabDetError(
                "AmpOptimWrapper: loss_scale is 'dynamic', a float such as 512.0, or a dict of the "
                f'arguments of torch.amp.GradScaler; got {loss_scale!r}'
            )
        self._scale_update_param = loss_scale if isinstance(loss_scale, float) else None
        options = {'init_scale': loss_scale} if isinstance(loss_scale, float) else loss_scale
        self.loss_scaler = torch.amp.GradScaler(
            'cpu', **({} if options == 'dynamic' else options), enabled=self.cast_dtype == torch.float16
        )
        scaling = 'a scaled loss' if self.loss_scaler.is_enabled() else 'no scaling of the loss, which needs none'
        print_log(f'AmpOptimWrapper: no GPU, so autocast on the CPU to {self.cast_dtype}, with {scaling}', 'current')

    def state_dict(self) -> dict:
        """mmengine's, but without a scaler that does nothing: no enabled one could be resumed from its empty state."""
        state = super().state_dict()
        if not self.loss_scaler.is_enabled():
            del state['loss_scaler']
        return state

    @contextmanager
    def optim_context(self, model: nn.Module) -> Iterator[None]:
        """Autocast, and no synchronization of gradients while they are accumulated."""
        if not self._on_cpu:
            with super().optim_context(model):
                yield
            return
        # mmengine's autocast allows only bfloat16 here.
        with OptimWrapper.optim_context(self, model), torch.autocast('cpu', self.cast_dtype):
            yield


def install_amp() -> None:
    """Has configs and ``--amp`` get :class:`AnyDeviceAmpOptimWrapper` under mmengine's name."""
    OPTIM_WRAPPERS.register_module('AmpOptimWrapper', force=True, module=AnyDeviceAmpOptimWrapper)
