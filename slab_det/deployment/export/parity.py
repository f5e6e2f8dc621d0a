"""How far an exported file is from its detector, with PyTorch's own rounding as the yardstick."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torchvision
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
    """The differences of one image, relative to the largest value of each output.

    Attributes:
        size: (H, W) of the image.
        differences: The file against the detector in float64, by output.
        own: The detector in float32 against itself in float64, by output.
        detections: How many the float64 detector found; None for scope 'backbone+neck+rpn'.
        unmatched: How many of them, or of the file's, have no partner of the same class.
    """

    size: tuple[int, int]
    differences: dict[str, float]
    own: dict[str, float]
    detections: int | None = None
    unmatched: int = 0

    @property
    def exact(self) -> bool:
        """Whether float32 explains the difference: at most ten times PyTorch's own, as fusion promises."""
        if self.detections is not None and self.unmatched > max(1, UNMATCHED_SHARE * self.detections):
            return False
        bound = FLOAT32_FACTOR * max(self.own.values(), default=0.0) + FLOAT64_BOUND
        return max(self.differences.values(), default=0.0) <= bound

    def __str__(self) -> str:
        worst = max(self.differences, key=self.differences.get, default=None)
        text = f'{self.size[0]}x{self.size[1]}: '
        if worst is not None:
            text += (
                f'largest relative difference {self.differences[worst]:.1e} in {worst} '
                f'(PyTorch in float32: {max(self.own.values()):.1e})'
            )
        if self.detections is not None:
            text += f', {self.detections} detections, {self.unmatched} without partner'
        return text


@torch.no_grad()
def check_parity(detector: nn.Module, runtime: Runtime, images: Iterable[np.ndarray]) -> list[ParityCheck]:
    """Compares an exported file with the detector it was made of.

    Args:
        detector: The detector, in eval mode.
        runtime: The file.
        images: (1, 3, H, W), float32, 0 to 255; sizes should differ.

    Raises:
        ExportError: If an output is missing, not finite or of another shape, or a difference is not rounding.
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
        check = _compare(tuple(image.shape[2:]), found, own, reference)
        if not check.exact:
            raise ExportError(
                f'the file does not compute what the detector does: {check}; do not use it, and please '
                'report this with the config'
            )
        checks.append(check)
    return checks


def random_images(sizes: Sequence[tuple[int, int]] = SIZES) -> list[np.ndarray]:
    """Seeded noise in each size."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(1, 3, *size, generator=generator) * 255).numpy() for size in sizes]


def match_detections(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Indices of detections that are the same object: same class, almost the same box.

    Args:
        first: 'boxes' (n, 4), 'scores' (n,), 'labels' (n,).
        second: The same with m detections.

    Returns:
        Two lists of one length; no index is in a list twice.
    """
    overlap = torchvision.ops.box_iou(first['boxes'].double(), second['boxes'].double())
    overlap[first['labels'][:, None] != second['labels'][None]] = 0
    # Duplicates within a class overlap too: the score tells them apart.
    closeness = overlap - (first['scores'].double()[:, None] - second['scores'].double()[None]).abs()
    closeness[overlap < MATCHED_IOU] = -torch.inf
    partners: dict[int, int] = {}
    for i in range(len(closeness)):
        free = [j for j in closeness[i].argsort(descending=True).tolist() if j not in partners]
        if free and closeness[i, free[0]] > -torch.inf:
            partners[free[0]] = i
    return torch.tensor(list(partners.values()), dtype=torch.long), torch.tensor(list(partners), dtype=torch.long)


def _compare(size: tuple[int, int], found: dict, own: dict, reference: dict) -> ParityCheck:
    """The distances of the file (``found``) and of PyTorch in float32 (``own``) to PyTorch in float64."""
    if 'boxes' not in reference:
        return ParityCheck(size, _distances(found, reference), _distances(own, reference))
    distances = []
    for outputs in (found, own):
        i, j = match_detections(reference, outputs)
        if outputs is found:
            unmatched = max(len(reference['boxes']), len(found['boxes'])) - len(i)
        names = [name for name in reference if name != 'labels']
        distances.append(_distances({n: outputs[n][j] for n in names}, {n: reference[n][i] for n in names}))
    return ParityCheck(size, *distances, len(reference['boxes']), unmatched)


def _distances(outputs: Mapping[str, Tensor], references: Mapping[str, Tensor]) -> dict[str, float]:
    """The largest difference over the largest reference, by output."""
    distances = {}
    for name, reference in references.items():
        output, reference = outputs[name].double(), reference.double()
        if output.shape != reference.shape:
            raise ExportError(f'{name} has shape {tuple(output.shape)}, the detector computes {tuple(reference.shape)}')
        if not torch.isfinite(output).all():
            raise ExportError(f'{name} is not finite')
        distances[name] = 0.0
        if reference.numel():
            distances[name] = float((output - reference).abs().max() / reference.abs().max().clamp(min=1e-12))
    return distances
