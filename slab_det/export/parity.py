"""Compares an exported file with its detector in float64.

The accepted difference is what PyTorch itself shows when it rounds the results of layers to the file's precision.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from slab_det.common.errors import ExportError
from slab_det.common.tensors import HALF_PRECISIONS
from slab_det.compare.difference import (
    HALF_FACTOR,
    UNMATCHED_SHARE,
    Comparison,
    accepted_difference,
    match_detections,
    relative_difference,
)
from slab_det.export.detector import DetectorGraph
from slab_det.export.loaded_file import LoadedFile, Run, crop_to_multiples
from slab_det.export.onnx_file import build_graph
from slab_det.families.half_precision import round_precision

# On a conclusive image a smaller difference than this shows: a tenth of the largest value.
LARGEST_BOUND = 0.1
# Number of detections to compare on an image: where fewer pass the score threshold, a lower one is used.
MIN_DETECTIONS = 100


class ParityCheck(Comparison):
    """Difference between an exported file and its detector in float64, on one image."""

    @property
    def conclusive(self) -> bool:
        """Whether PyTorch in the file's precision agrees with float64 on this image; otherwise no runtime could."""
        return self.num_values > 0 and self.bound <= LARGEST_BOUND

    def __str__(self) -> str:
        return super().__str__() + ('' if self.conclusive else ': this image is inconclusive')


@torch.no_grad()
def check_parity(detector: nn.Module, runtime: LoadedFile, images: Iterable[np.ndarray]) -> list[ParityCheck]:
    """Compares the outputs of an exported file with the outputs of its detector.

    A detector finds little in noise. Where fewer than ``MIN_DETECTIONS`` pass its score threshold, file and detector
    are compared at a lower threshold.

    A file in half precision is compared at the bound of what rounding the same parts explains.

    Args:
        detector: The detector, in eval mode.
        runtime: The file.
        images: (1, C, H, W), float32, 0 to 255; sizes should differ. They are cropped to sizes that the file takes.

    Raises:
        ExportError: If a weight or an output is not finite, an output is missing or has another shape, a difference is
            more than rounding, or no image is :attr:`~ParityCheck.conclusive`.
    """
    graph = build_graph(detector, runtime.metadata['scope']).float()
    graph64, checks = copy.deepcopy(graph).double(), []
    precision = runtime.metadata['precision']
    dtype = getattr(torch, precision)
    if dtype != torch.float32:
        round_precision(graph.detector, dtype)
    # A backbone has no score threshold, and would be loaded twice.
    run_all = runtime.with_threshold(0.0).run if isinstance(graph, DetectorGraph) else None
    divisor = runtime.metadata['image']['size_divisor']
    for image in images:
        image = np.ascontiguousarray(crop_to_multiples(image, divisor))
        check = _check_image(graph, graph64, runtime.run, run_all, torch.from_numpy(image), dtype)
        if check.conclusive and not check.same:
            raise ExportError(
                f'the file does not compute what the detector does: {check}; do not use it, and please '
                'report this with the config'
            )
        checks.append(check)
    if not any(check.conclusive for check in checks):
        raise ExportError(
            f'none of {len(checks)} images shows whether the file is right: PyTorch itself differs between {precision} '
            'and float64, as detectors without norms do on noise; pass photographs with --check-images. If some of '
            'these are photographs, the weights amplify rounding, as untrained ones do: no runtime computes them '
            'exactly'
        )
    return checks


def _check_image(
    graph: nn.Module, graph64: nn.Module, run: Run, run_all: Run | None, image: Tensor, dtype: torch.dtype
) -> ParityCheck:
    found, side, unmatched = _outputs(graph, run, image), max(image.shape) if run_all else None, 0.0
    what = '{}x{}'.format(*image.shape[2:])
    if run_all is not None:
        what += f', {len(found[1])} detections'
        # NMS keeps the same best detections at every score threshold.
        everything = _outputs(graph, run_all, image)
        score_thr = graph.family.score_thr
        found = _above(score_thr, found) if graph.family.lowers_scores else found
        *_, unmatched = match_detections(found, _above(score_thr, everything), side, dtype)
        score_thr = min([score_thr, *(0.999 * everything[1][:MIN_DETECTIONS][-1:]).tolist()])
        found = _above(score_thr, everything)
        for module in (graph, graph64):
            module.score_thr.fill_(score_thr)
    reference, rounded = graph64(image.double()), graph(image)
    if run_all is not None:
        reference, rounded = _above(score_thr, reference), _above(score_thr, rounded)
    difference, share, _ = _compare(found, reference, side, dtype)
    rounding, explained, num_values = _compare(rounded, reference, side, dtype)
    unmatched = max(unmatched, share)
    # In half precision, NMS chooses another of two proposals of nearly equal scores in a right file too.
    factor = HALF_FACTOR if dtype in HALF_PRECISIONS else 1
    if unmatched > factor * UNMATCHED_SHARE:
        difference = math.inf
    if explained > UNMATCHED_SHARE:
        rounding = math.inf
    what += f' ({unmatched:.1%} unmatched)' if side else ''
    return ParityCheck(what, num_values, difference, rounding, accepted_difference(rounding, dtype))


def _compare(
    outputs: Sequence[Tensor], references: Sequence[Tensor], side: int | None, dtype: torch.dtype
) -> tuple[float, float, int]:
    """The difference of outputs, the share of unmatched detections if they have boxes, and the number of values."""
    unmatched = 0.0
    if side is not None:
        outputs, references, unmatched = match_detections(outputs, references, side, dtype)
    return relative_difference(outputs, references), unmatched, sum(x.numel() for x in references)


def _outputs(graph: nn.Module, run: Run, image: Tensor) -> list[Tensor]:
    """The outputs of the file, in the order of the graph."""
    found, names = run(image.numpy()), graph.output_names()
    if found.keys() != {*names}:
        raise ExportError(f'the file has the outputs {sorted(found)}, expected {sorted(names)}')
    return [torch.from_numpy(found[name]) for name in names]


def _above(score_thr: float, detections: Sequence[Tensor]) -> list[Tensor]:
    return [values[detections[1] > score_thr] for values in detections]


def random_images(sizes: Sequence[tuple[int, int]], channels: int = 3) -> list[np.ndarray]:
    """Seeded noise images (1, C, H, W), 0 to 255, one of each size."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, channels, *size) for size in sizes)
    return [(torch.rand(shape, generator=generator, dtype=torch.float32) * 255).numpy() for shape in shapes]
