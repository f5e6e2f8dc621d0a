"""Compares an exported file with its detector in float64; PyTorch in float32 shows how much rounding is normal."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from slab_det.deployment.export.detector import DetectorGraph
from slab_det.deployment.export.onnx_file import build_graph
from slab_det.deployment.export.runtime import Run, Runtime
from slab_det.fusion.verify import FLOAT32_FACTOR, FLOAT64_BOUND, relative_difference
from slab_det.runtime.errors import ExportError

# Multiples of 32 and others, small and large, portrait and landscape.
SIZES = ((96, 160), (131, 203), (331, 97))
# Largest difference between PyTorch in float32 and in float64 on a conclusive image.
MAX_OWN_DIFFERENCE = 0.01
# Largest share of unmatched detections: rounding moves scores and overlaps across thresholds.
UNMATCHED_SHARE = 0.02
# Two detections match if corners differ by less than this share of the image, and scores by less than this.
NEAR = 1e-4
# Number of detections to compare on an image: where fewer pass the score threshold, a lower one is used.
MIN_DETECTIONS = 100


@dataclass(frozen=True)
class ParityCheck:
    """Difference between an exported file and its detector on one image.

    Attributes:
        size: (H, W) of the image.
        num_values: How many values of the outputs were compared.
        difference: Largest difference of the file from the detector in float64, relative to the largest value of an
            output.
        own: The same difference for the detector in float32.
        unmatched: Share of detections in the results of the file or of the detector that have no match in the other
            results; fewer than 50 detections count as 50. The values of matched detections are compared.
        own_unmatched: The same share for the detector in float32.
        detections: How many detections the file has; None for the scope 'backbone'.
    """

    size: tuple[int, int]
    num_values: int
    difference: float
    own: float
    unmatched: float
    own_unmatched: float
    detections: int | None

    @property
    def conclusive(self) -> bool:
        """Whether PyTorch in float32 agrees with float64 on this image; otherwise no runtime could."""
        return self.num_values > 0 and self.own <= MAX_OWN_DIFFERENCE and self.own_unmatched <= UNMATCHED_SHARE

    @property
    def exact(self) -> bool:
        """Whether the difference is rounding: at most ten times the difference of PyTorch in float32."""
        # An output that is not finite, or has another shape, makes the difference infinite.
        bound = FLOAT32_FACTOR * self.own + FLOAT64_BOUND
        return self.difference <= bound < math.inf and self.unmatched <= UNMATCHED_SHARE

    def __str__(self) -> str:
        text = (
            f'{self.size[0]}x{self.size[1]}: largest relative difference of {self.num_values:,} values '
            f'{self.difference:.1e} (PyTorch in float32: {self.own:.1e})'
        )
        if self.detections is not None:
            text += f'; {self.detections} detections, {self.unmatched:.1%} unmatched'
        if not self.conclusive:
            text += f' (PyTorch in float32: {self.own_unmatched:.1%} unmatched): this image is inconclusive'
        return text


@torch.no_grad()
def check_parity(detector: nn.Module, runtime: Runtime, images: Iterable[np.ndarray]) -> list[ParityCheck]:
    """Compares the outputs of an exported file with the outputs of its detector.

    A detector finds little in noise. Where fewer than ``MIN_DETECTIONS`` pass its score threshold, file and detector
    are compared at a lower threshold.

    Args:
        detector: The detector, in eval mode.
        runtime: The file.
        images: (1, C, H, W), float32, 0 to 255; sizes should differ.

    Raises:
        ExportError: If a weight or an output is not finite, an output is missing or has another shape, a difference is
            more than rounding, or no image is :attr:`~ParityCheck.conclusive`.
    """
    graph = build_graph(detector, runtime.metadata['scope']).float()
    graph64, checks = copy.deepcopy(graph).double(), []
    # A backbone has no score threshold, and would be loaded twice.
    run_all = runtime.with_threshold(0.0) if isinstance(graph, DetectorGraph) else None
    for image in images:
        check = _check_image(graph, graph64, runtime.run, run_all, torch.from_numpy(image))
        if check.conclusive and not check.exact:
            raise ExportError(
                f'the file does not compute what the detector does: {check}; do not use it, and please '
                'report this with the config'
            )
        checks.append(check)
    if not any(check.conclusive for check in checks):
        raise ExportError(
            f'none of {len(checks)} images shows whether the file is right: PyTorch itself differs between float32 and '
            'float64, as detectors without norms do on noise; pass photographs with --check-images'
        )
    return checks


def _check_image(graph: nn.Module, graph64: nn.Module, run: Run, run_all: Run | None, image: Tensor) -> ParityCheck:
    found, compare = _outputs(graph, run, image), _compare_maps
    detections, threshold_unmatched = None, 0.0
    if isinstance(graph, DetectorGraph):
        compare, detections = _compare_detections, len(found[1])
        # NMS keeps the same best detections at every score threshold.
        everything = _outputs(graph, run_all, image)
        score_thr = graph.detector.roi_head.test_cfg.score_thr
        threshold_unmatched = compare(found, _above(score_thr, everything), image)[1]
        score_thr = min([score_thr, *(0.999 * everything[1][:MIN_DETECTIONS][-1:]).tolist()])
        found = _above(score_thr, everything)
        for module in (graph, graph64):
            module.score_thr.fill_(score_thr)
    reference = graph64(image.double())
    difference, unmatched, _ = compare(found, reference, image)
    own, own_unmatched, num_values = compare(graph(image), reference, image)
    return ParityCheck(
        size=tuple(image.shape[2:]),
        num_values=num_values,
        difference=difference,
        own=own,
        unmatched=max(unmatched, threshold_unmatched),
        own_unmatched=own_unmatched,
        detections=detections,
    )


def _outputs(graph: nn.Module, run: Run, image: Tensor) -> list[Tensor]:
    """The outputs of the file, in the order of the graph."""
    found, names = run(image.numpy()), graph.output_names()
    if found.keys() != {*names}:
        raise ExportError(f'the file has the outputs {sorted(found)}, expected {sorted(names)}')
    return [torch.from_numpy(found[name]) for name in names]


def _above(score_thr: float, detections: Sequence[Tensor]) -> list[Tensor]:
    return [values[detections[1] > score_thr] for values in detections]


def _compare_maps(first: Sequence[Tensor], second: Sequence[Tensor], image: Tensor) -> tuple[float, float, int]:
    """As :func:`_compare_detections`, for feature maps."""
    return relative_difference(first, second), 0.0, sum(x.numel() for x in second)


def _compare_detections(first: Sequence[Tensor], second: Sequence[Tensor], image: Tensor) -> tuple[float, float, int]:
    """Compares each detection with the nearest one of another run: boxes, scores, labels and mask logits, if any.

    Returns:
        The largest relative difference of the values of matched detections; the share of unmatched detections, where
        fewer than 50 detections count as 50; and the number of values that were compared.
    """
    rows = [
        torch.cat([boxes.double() / max(image.shape), scores.double()[:, None], labels.double()[:, None]], 1)
        for boxes, scores, labels, *_ in (first, second)
    ]
    distance = torch.cdist(*rows, p=math.inf)
    near = distance <= NEAR
    num_unmatched = max(abs(len(rows[0]) - len(rows[1])), *((~near.any(dim)).sum().item() for dim in (0, 1)))
    share = num_unmatched / max(*map(len, rows), 1 / UNMATCHED_SHARE)
    paired = near.any(1).nonzero()[:, 0]
    partner = distance[paired].argmin(1) if len(paired) else paired
    values = [x[paired] for x in first], [x[partner] for x in second]
    return relative_difference(*values), share, sum(x.numel() for x in values[0])


def random_images(sizes: Sequence[tuple[int, int]] = SIZES, channels: int = 3) -> list[np.ndarray]:
    """Seeded noise images (1, C, H, W), 0 to 255, one of each size."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, channels, *size) for size in sizes)
    return [(torch.rand(shape, generator=generator, dtype=torch.float32) * 255).numpy() for shape in shapes]
