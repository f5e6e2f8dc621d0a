"""How far an exported file is from its detector, with PyTorch's own rounding as the yardstick."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torchvision
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from slab_det.deployment.export.graph import build_graph
from slab_det.deployment.export.runtime import Runtime
from slab_det.fusion.verify import FLOAT32_FACTOR, FLOAT64_BOUND
from slab_det.runtime.errors import ExportError

# No two multiples of 32, of a window, or of each other.
SIZES = ((96, 160), (131, 203), (331, 97))
# Thresholds are cliffs: a box whose overlap or score is one to the last bit falls on either side.
UNMATCHED_SHARE = 0.02
MATCHED_IOU = 0.95


@dataclass(frozen=True)
class ParityCheck:
    """The largest difference of one image, relative to the largest value of its output.

    Attributes:
        size: (H, W) of the image.
        output: Where the file differs most.
        difference: The file against the detector in float64.
        own: The detector in float32 against itself in float64.
        detections: How many the float64 detector found; None for scope 'backbone+neck+rpn'.
        unmatched: How many of them, or of the file's, have no partner of the same class.
        own_unmatched: The same of the detector in float32.
    """

    size: tuple[int, int]
    output: str
    difference: float
    own: float
    detections: int | None
    unmatched: int
    own_unmatched: int = 0

    @property
    def telling(self) -> bool:
        """Whether PyTorch finds the same objects in float32: otherwise no runtime can be asked to."""
        return self.own_unmatched <= self._tolerated

    @property
    def _tolerated(self) -> float:
        return max(1, UNMATCHED_SHARE * (self.detections or 0))

    @property
    def exact(self) -> bool:
        """Whether float32 explains the difference: at most ten times PyTorch's own, as fusion promises."""
        bound = FLOAT32_FACTOR * self.own + FLOAT64_BOUND
        # Infinite: an output is not finite or has another shape. PyTorch's own may be infinite too.
        is_matched = self.unmatched <= self._tolerated
        return is_matched and math.isfinite(self.difference) and self.difference <= bound

    def __str__(self) -> str:
        text = (
            f'{self.size[0]}x{self.size[1]}: largest relative difference {self.difference:.1e} in {self.output} '
            f'(PyTorch in float32: {self.own:.1e})'
        )
        if self.detections is not None:
            text += f', {self.detections} detections, {self.unmatched} without partner'
        if not self.telling:
            text += f' (PyTorch in float32: {self.own_unmatched}, so that this image tells nothing)'
        return text


@torch.no_grad()
def check_parity(detector: nn.Module, runtime: Runtime, images: Iterable[np.ndarray]) -> list[ParityCheck]:
    """Compares an exported file with the detector it was made of.

    Args:
        detector: The detector, in eval mode.
        runtime: The file.
        images: (1, 3, H, W), float32, 0 to 255; sizes should differ.

    Raises:
        ExportError: If an output is missing, not finite or of another shape, a difference is not rounding, or no image
            is :attr:`~ParityCheck.telling`.
    """
    graph = build_graph(detector, runtime.metadata['scope']).float()
    graph64, names = copy.deepcopy(graph).double(), graph.output_names()
    checks = []
    for image in images:
        tensor = torch.from_numpy(image)
        reference = dict(zip(names, graph64(tensor.double()), strict=True))
        own = dict(zip(names, graph(tensor), strict=True))
        found = {name: torch.from_numpy(value) for name, value in runtime.run(image).items()}
        if found.keys() != reference.keys():
            raise ExportError(f'the file has the outputs {sorted(found)}, expected {sorted(reference)}')
        difference, output, unmatched = _largest_difference(found, reference)
        detections = len(reference['boxes']) if 'boxes' in reference else None
        own_difference, _, own_unmatched = _largest_difference(own, reference)
        size = tuple(image.shape[2:])
        check = ParityCheck(size, output, difference, own_difference, detections, unmatched, own_unmatched)
        if check.telling and not check.exact:
            raise ExportError(
                f'the file does not compute what the detector does: {check}; do not use it, and please '
                'report this with the config'
            )
        checks.append(check)
    if not any(check.telling for check in checks):
        raise ExportError(
            f'none of {len(checks)} images tells whether the file is right: in float32 PyTorch finds other objects '
            'than in float64. Noise does that to detectors without norms; name photographs with --check-images'
        )
    return checks


def _largest_difference(outputs: Mapping[str, Tensor], reference: Mapping[str, Tensor]) -> tuple[float, str, int]:
    """The largest difference over the largest reference, the output it is in, and detections without partner."""
    unmatched = 0
    if 'boxes' in reference:
        i, j = match_detections(reference, outputs)
        unmatched = max(len(reference['boxes']), len(outputs['boxes'])) - len(i)
        outputs = {name: output[j] for name, output in outputs.items()}
        reference = {name: expected[i] for name, expected in reference.items()}
    differences = dict.fromkeys(reference, math.inf)
    for name, expected in reference.items():
        output, expected = outputs[name].double(), expected.double()
        if output.shape == expected.shape and output.isfinite().all():
            distance, largest = ((output - expected).abs(), expected.abs()) if len(expected) else (torch.zeros(1),) * 2
            differences[name] = float(distance.max() / largest.max().clamp(min=1e-12))
    worst = max(differences, key=differences.get)
    return differences[worst], worst, unmatched


def random_images(sizes: Sequence[tuple[int, int]] = SIZES) -> list[np.ndarray]:
    """Seeded noise in each size."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(1, 3, *size, generator=generator) * 255).numpy() for size in sizes]


def match_detections(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Indices in both of detections that are the same object: same class, almost the same box.

    Args:
        first: 'boxes' (n, 4), 'scores' (n,), 'labels' (n,).
        second: The same with m detections.
    """
    overlap = torchvision.ops.box_iou(first['boxes'].double(), second['boxes'].double())
    # Duplicates within a class overlap too: the score tells them apart.
    closeness = overlap - (first['scores'].double()[:, None] - second['scores'].double()[None]).abs()
    # One such pair weighs more than all that a better partner for others could gain.
    closeness[(overlap < MATCHED_IOU) | (first['labels'][:, None] != second['labels'][None])] = -1000.0
    i, j = map(torch.from_numpy, linear_sum_assignment(closeness.nan_to_num(-1000.0), maximize=True))
    matched = closeness[i, j] > -1000.0
    return i[matched], j[matched]
