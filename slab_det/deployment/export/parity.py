"""Compares an exported file with its detector in float64; PyTorch in float32 shows how much rounding is normal."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from slab_det.deployment.export.detector import KINDS
from slab_det.deployment.export.graph import build_graph
from slab_det.deployment.export.runtime import Run, Runtime
from slab_det.fusion.verify import FLOAT32_FACTOR, FLOAT64_BOUND, relative_difference
from slab_det.runtime.errors import ExportError

# Multiples of 32 and others, small and large, upright and lying.
SIZES = ((96, 160), (131, 203), (331, 97))
# Images on which PyTorch in float32 is farther from float64 prove nothing.
MOST_OWN = 0.01
# Largest share of boxes without partner: rounding moves scores and overlaps across thresholds.
UNMATCHED_SHARE = 0.02
# Two boxes are the same if corners differ by less than this share of the image, and scores by less than this.
NEAR = 1e-4
# Number of detections that are compared on an image at least, whatever their scores.
LEAST_DETECTIONS = 20
DETECTIONS = ('boxes', 'scores', 'labels')


@dataclass(frozen=True)
class ParityCheck:
    """How far a file is from its detector on one image; differences are relative to the largest value of an output.

    Attributes:
        size: (H, W) of the image.
        num_values: How many values of features, objectness, deltas, class and mask logits were compared.
        output: The output in which the file differs most.
        difference: Difference of the file from the detector in float64, in this output.
        own: Difference of the detector in float32 from itself in float64.
        num_boxes: How many proposals and detections were compared.
        unmatched: Share of these boxes that the file does not have; one of less than 50 counts as one of 50.
        own_unmatched: Share of these boxes that the detector in float32 does not have.
        detections: How many detections the file has; None for the scope 'backbone'.
    """

    size: tuple[int, int]
    num_values: int
    output: str
    difference: float
    own: float
    num_boxes: int = 0
    unmatched: float = 0.0
    own_unmatched: float = 0.0
    detections: int | None = None

    @property
    def conclusive(self) -> bool:
        """Whether PyTorch in float32 agrees with float64 on this image; otherwise no runtime could."""
        return self.num_values > 0 and self.own <= MOST_OWN and self.own_unmatched <= UNMATCHED_SHARE

    @property
    def exact(self) -> bool:
        """Whether the difference is rounding: at most ten times the difference of PyTorch in float32."""
        # An output that is not finite, or has another shape, makes the difference infinite.
        bound = FLOAT32_FACTOR * self.own + FLOAT64_BOUND
        return self.difference <= bound < math.inf and self.unmatched <= UNMATCHED_SHARE

    def __str__(self) -> str:
        text = (
            f'{self.size[0]}x{self.size[1]}: largest relative difference of {self.num_values:,} values '
            f'{self.difference:.1e} in {self.output} (PyTorch in float32: {self.own:.1e})'
        )
        if self.detections is not None:
            text += f'; {self.num_boxes} boxes, {self.unmatched:.1%} without partner; {self.detections} detections'
        if not self.conclusive:
            text += f' (PyTorch in float32: {self.own_unmatched:.1%} without partner): this image proves nothing'
        return text


@torch.no_grad()
def check_parity(detector: nn.Module, runtime: Runtime, images: Iterable[np.ndarray]) -> list[ParityCheck]:
    """Compares an exported file with its detector, step by step.

    Each step of the reference reads what the file computed in the steps before: otherwise rounding would choose other
    boxes. Where fewer than ``LEAST_DETECTIONS`` pass the threshold of scores, file and reference get a lower one.

    Args:
        detector: The detector, in eval mode.
        runtime: The file.
        images: (1, 3, H, W), float32, 0 to 255; sizes should differ.

    Raises:
        ExportError: If a weight or an output is not finite, an output is missing or has another shape, a difference is
            more than rounding, or no image is :attr:`~ParityCheck.conclusive`.
    """
    graph = build_graph(detector, runtime.metadata['scope']).float()
    graph64, inspect, checks = copy.deepcopy(graph).double(), None, []
    for image in images:
        tensor = torch.from_numpy(image)
        inspect = inspect or runtime.inspect([*graph.run(tensor)])
        check = _check_image(graph, graph64, runtime.run, inspect, tensor)
        if check.conclusive and not check.exact:
            raise ExportError(
                f'the file does not compute what the detector does: {check}; do not use it, and please '
                'report this with the config'
            )
        checks.append(check)
    if not any(check.conclusive for check in checks):
        raise ExportError(
            f'none of {len(checks)} images shows whether the file is right: PyTorch itself differs between float32 and '
            'float64, as detectors without norms do on noise; name photographs with --check-images'
        )
    return checks


def _check_image(graph: nn.Module, graph64: nn.Module, run: Run, inspect: Run, image: Tensor) -> ParityCheck:
    outputs, thresholds, shares = _as_tensors(run(image.numpy())), {}, []
    if outputs.keys() != {*graph.output_names()}:
        raise ExportError(f'the file has the outputs {sorted(outputs)}, expected {sorted(graph.output_names())}')
    if 'scores' in outputs:
        # With the detector's threshold of scores, the file finds the same as with its own.
        found = _as_tensors(inspect(image.numpy(), score_thr=graph.score_thr.numpy()))
        shares.append(_unmatched_share(*(_rows(values, DETECTIONS, image) for values in (outputs, found))))
        scores = found['class_logits'].softmax(-1)[:, :-1].flatten()
        best = scores.topk(min(LEAST_DETECTIONS, len(scores))).values
        thresholds = dict(score_thr=torch.cat([graph.score_thr[None], 0.999 * best]).min())
    found = _as_tensors(inspect(image.numpy(), **{name: value.numpy() for name, value in thresholds.items()}))
    own = graph.run(image, {**found, **thresholds})
    double = {name: value.double() if value.is_floating_point() else value for name, value in found.items()}
    reference = graph64.run(image.double(), {**double, **thresholds})
    boxes = [group for group in (('proposals',), DETECTIONS) if group[0] in reference]
    compared = [name for name in reference if name not in chain(*boxes)]
    differences = []
    # A single output may round little by chance: its bound is the largest rounding of its stage.
    for is_first_stage in (True, False):
        names = [name for name in compared if name.startswith(KINDS) == is_first_stage]
        own_difference = relative_difference(*([values[name] for name in names] for values in (own, reference)))
        for name in names:
            difference = relative_difference([found[name]], [reference[name]])
            differences.append((difference / (own_difference + FLOAT64_BOUND), name, difference, own_difference))
    _, output, difference, own_difference = max(differences)
    found_shares, own_shares = (
        [_unmatched_share(*(_rows(x, group, image) for x in (values, reference))) for group in boxes]
        for values in (found, own)
    )
    counts = [reference[name].numel() for name in compared]
    return ParityCheck(
        size=tuple(image.shape[2:]),
        num_values=sum(counts) if all(counts) else 0,
        output=output,
        difference=difference,
        own=own_difference,
        num_boxes=sum(len(reference[group[0]]) for group in boxes),
        unmatched=max([*shares, *found_shares], default=0.0),
        own_unmatched=max(own_shares, default=0.0),
        detections=len(outputs['scores']) if 'scores' in outputs else None,
    )


def _as_tensors(values: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(value) for name, value in values.items()}


def _rows(values: Mapping[str, Tensor], names: Sequence[str], image: Tensor) -> Tensor:
    """Boxes in shares of the image's larger side, perhaps with scores and labels, (n, 4) or (n, 6)."""
    corners, *others = (values[name].double() for name in names)
    return torch.cat([corners / max(image.shape), *(other[:, None] for other in others)], 1)


def _unmatched_share(first: Tensor, second: Tensor) -> float:
    """Number of rows without a near row in the other set, over the size of the larger set, at least 50."""
    near = torch.cdist(first, second, p=math.inf) <= NEAR
    lonely = max((~near.any(dim)).sum().item() for dim in (0, 1))
    return max(lonely, abs(len(first) - len(second))) / max(len(first), len(second), 1 / UNMATCHED_SHARE)


def random_images(sizes: Sequence[tuple[int, int]] = SIZES) -> list[np.ndarray]:
    """Seeded noise in each size."""
    generator = torch.Generator().manual_seed(0)
    return [(torch.rand(1, 3, *size, generator=generator) * 255).numpy() for size in sizes]
