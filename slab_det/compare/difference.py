"""How far apart the outputs of two models are, and how far rounding to a dtype moves the outputs of a model, whatever
kernels this machine has for the dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from slab_det.common.modules import copy_module
from slab_det.common.tensors import HALF_PRECISIONS, map_tensors, tensors_in

# Largest accepted ratio of a difference to what rounding explains. Usual ratios are 0.8 to 1.3 in half precision; in
# float32 1 to 4 (Winograd's convolutions), and up to 6 in untrained models that amplify rounding.
HALF_FACTOR = 4.0
FLOAT32_FACTOR = 10.0
# Detections match if corners differ by less than this share of the image, and scores by less than this: much more than
# rounding in float32, much less than between two objects. It accepts no error, as matched detections are compared.
NEAR = 1e-4
# The same for half precision, which moves corners and scores by up to some thousandths.
HALF_NEAR = 1e-2
# Largest accepted share of detections without a match: rounding moves scores and overlaps across thresholds.
UNMATCHED_SHARE = 0.02


@dataclass(frozen=True)
class Comparison:
    """How far the outputs of another form of a model are from those of the model.

    Attributes:
        what: The outputs that were compared.
        num_values: How many values they have.
        difference: The difference between the two forms, relative to the size of the outputs.
        rounding: The difference that the dtype of the other form explains: between the model with results rounded to
            this dtype and the model in float64.
        bound: The largest accepted difference; see :func:`accepted_difference`.
    """

    what: str
    num_values: int
    difference: float
    rounding: float
    bound: float

    @property
    def same(self) -> bool:
        """Whether something was compared, and rounding explains the difference."""
        return self.num_values > 0 and self.difference <= self.bound < math.inf

    def __str__(self) -> str:
        return (
            f'{self.what}: relative difference {self.difference:.1e} in {self.num_values:,} values '
            f'(rounding explains {self.rounding:.1e})'
        )


def accepted_difference(rounding: float, dtype: torch.dtype) -> float:
    """The largest accepted difference of a form in ``dtype``, where rounding to it explains ``rounding``."""
    # A model that copies its input rounds nothing.
    return (HALF_FACTOR if dtype in HALF_PRECISIONS else FLOAT32_FACTOR) * max(rounding, torch.finfo(dtype).eps / 4)


def relative_difference(outputs: Iterable[Tensor], references: Iterable[Tensor]) -> float:
    """The largest difference of a value, relative to the largest value of its reference; of the worst output."""
    return max((_distance(*pair, math.inf) for pair in zip(outputs, references, strict=True)), default=0.0)


def rms_difference(output: Tensor, reference: Tensor) -> float:
    """Root mean square of ``output - reference``, relative to the root mean square of ``reference``.

    It is steadier than :func:`relative_difference`, which a single wrong value changes.
    """
    return _distance(output, reference, 2)


def _distance(output: Tensor, reference: Tensor, order: float) -> float:
    """Relative distance in a norm; infinite if ``output`` has another shape or is not finite, 0 if both are empty."""
    output, reference = output.double(), reference.double()
    if output.shape != reference.shape or not output.isfinite().all():
        return math.inf
    if not output.numel():
        return 0.0
    scale = torch.linalg.vector_norm(reference, order).clamp(min=torch.finfo(torch.float64).tiny)
    return (torch.linalg.vector_norm(output - reference, order) / scale).nan_to_num(math.inf).item()


def match_detections(
    first: Sequence[Tensor], second: Sequence[Tensor], side: int, dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor], float]:
    """Matches each detection with the nearest one of another run.

    Args:
        first: Boxes (n, 4) in pixels, scores (n,), labels (n,), and other values of each detection.
        second: The same of another run.
        side: The longer side of the image.
        dtype: The precision of the runs.

    Returns:
        The matched detections of both runs; and the share of detections without a match, where fewer than 50
        detections count as 50.
    """
    rows = [
        torch.cat([boxes.double() / side, scores.double()[:, None], labels.double()[:, None]], 1)
        for boxes, scores, labels, *_ in (first, second)
    ]
    distance = torch.cdist(*rows, p=math.inf)
    near = distance <= (HALF_NEAR if dtype in HALF_PRECISIONS else NEAR)
    num_unmatched = max(abs(len(rows[0]) - len(rows[1])), *((~near.any(dim)).sum().item() for dim in (0, 1)))
    matched = near.any(1).nonzero()[:, 0]
    partner = distance[matched].argmin(1) if len(matched) else matched
    share = num_unmatched / max(*map(len, rows), 1 / UNMATCHED_SHARE)
    return [x[matched] for x in first], [x[partner] for x in second], share


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
