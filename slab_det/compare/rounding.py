"""Differences between the outputs of two models, and how much of them rounding explains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slab_det.runtime.copying import copy_module
from slab_det.runtime.tensors import map_tensors, tensors_in


def rms_difference(output: Tensor, reference: Tensor) -> float:
    """Root mean square of ``output - reference``, relative to the root mean square of ``reference``.

    Infinite if ``output`` has another shape or is not finite; 0 if both are all zeros or empty.
    """
    output, reference = output.double(), reference.double()
    if output.shape != reference.shape or not output.isfinite().all():
        return math.inf
    scale = reference.norm().clamp(min=torch.finfo(torch.float64).tiny)
    return ((output - reference).norm() / scale).nan_to_num(math.inf).item()


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


@torch.no_grad()
def run_rounded(model: nn.Module, dtype: torch.dtype, run: Callable[[nn.Module], Sequence[Tensor]]) -> list[Tensor]:
    """What ``run(model)`` should return in ``dtype``: weights and the result of every operator are rounded to it.

    Args:
        model: A model in float32.
        dtype: A half precision.
        run: Runs a model on inputs in the dtype of its parameters.
    """
    rounded = copy_module(model)
    for tensor in (*rounded.parameters(), *rounded.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype).to(tensor.dtype)
    with RoundedArithmetic(dtype):
        return [*run(rounded)]
