"""How far rounding to a dtype moves the outputs of a model, whatever kernels this machine has for the dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slab_det.common.modules import copy_module
from slab_det.common.tensors import HALF_PRECISIONS, map_tensors, tensors_in
from slab_det.compare.difference import rms_difference


class RoundedArithmetic(TorchDispatchMode):
    """Rounds the result of every operator to ``dtype``; tensors, kernels and sums keep their own dtype.

    A float32 model computes under this mode what it should give in half precision, whatever the half-precision kernels
    of the machine compute.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        memory = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}

        def rounded(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            if x.untyped_storage().data_ptr() not in memory:
                return x.to(self.dtype).to(x.dtype)
            # A view holds rounded values; an in-place operator must write to the memory of its argument.
            return x.copy_(x.to(self.dtype)) if func._schema.is_mutable else x

        return map_tensors(rounded, func(*args, **kwargs))


def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Rounds parameters and buffers to the values that ``dtype`` has, in place; they keep their own dtype."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype).to(tensor.dtype)


@torch.no_grad()
def run_rounded(model: nn.Module, dtype: torch.dtype, run: Callable[[nn.Module], Sequence[Tensor]]) -> list[Tensor]:
    """What ``run(model)`` should return in ``dtype``: weights and the result of every operator are rounded to it.

    Args:
        model: A model in float32.
        dtype: A half precision.
        run: Runs a model on inputs in the dtype of its parameters.
    """
    rounded = copy_module(model)
    round_weights(rounded, dtype)
    with RoundedArithmetic(dtype):
        return [*run(rounded)]


@torch.no_grad()
def explain_rounding(
    model: nn.Module, dtype: torch.dtype, run: Callable[[nn.Module], Sequence[Tensor]], references: Sequence[Tensor]
) -> list[float]:
    """How far rounding to ``dtype`` moves each output of ``run(model)`` from ``references``.

    These are in float64, or in float32 where the model does not run in float64.
    """
    single, simulated = copy_module(model).float(), dtype
    if dtype in HALF_PRECISIONS or any(x.dtype != torch.float64 for x in references):
        # Another run in float32 would equal references in float32.
        simulated = dtype if dtype in HALF_PRECISIONS else torch.bfloat16
        rounded = run_rounded(single, simulated, run)
    else:
        # The kernels of float32, because convolutions on a GPU may round to TF32.
        rounded, simulated = run(single), torch.float32
    scale = torch.finfo(dtype).eps / torch.finfo(simulated).eps
    return [scale * rms_difference(*pair) for pair in zip(rounded, references, strict=True)]
