"""How far apart the outputs of two models are, and how far apart rounding allows them to be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slab_det.common.tensors import HALF_PRECISIONS

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
