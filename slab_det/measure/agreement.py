"""Agreement of two detectors on images without labels: what a student lost of its teacher's AP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from mmdet.structures import DetDataSample
from mmdet.structures.mask import encode_mask_results
from pycocotools import mask as coco_mask
from torch import nn

from slab_det.recalibration.moments import evaluating, one_pass, prepare_inputs
from slab_det.runtime.errors import AgreementError

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
# The loss of AP is about LOSS (1 - agreement)^2: the least squares of 11 absorbed detectors, three of them for int8, of
# teachers of 2,000 iterations on BCCD and DSB2018, from which single ones are off by up to 0.012; eleven more, measured
# after, by up to 0.014. Teachers of a quarter of the iterations lose half of it; on photographs, with a teacher of 0.14
# AP, it is hardly seen.
LOSS = 0.97
# The three detectors that reached it lost at most 0.006.
LEAST_AGREEMENT = 0.95
_RECALLS = np.linspace(0.0, 1.0, 101)


@dataclass(frozen=True)
class Detections:
    """What a detector found in one image, the surest first.

    Attributes:
        scores: (N,), in (0, 1].
        labels: Class of each, (N,).
        regions: Boxes as x, y, width, height, (N, 4), or N masks, run-length encoded as COCO has them.
    """

    scores: np.ndarray
    labels: np.ndarray
    regions: np.ndarray | list[dict]

    def select(self, indices: np.ndarray) -> Detections:
        """Those of these indices, in their order."""
        masks = isinstance(self.regions, list)
        regions = [self.regions[i] for i in indices] if masks else self.regions[indices]
        return Detections(self.scores[indices], self.labels[indices], regions)


@torch.no_grad()
def detect(model: nn.Module, batches: Iterable) -> list[Detections]:
    """What a detector finds, by the forward of its test loop.

    Args:
        model: A detector.
        batches: What a data loader yields, or normalised images (B, 3, H, W).

    Returns:
        The detections of each image: masks where the detector has them, or else boxes.

    Raises:
        AgreementError: If there is no image, or ``model`` does not find instances.
    """
    prepare, found = prepare_inputs(model, batches), []
    with evaluating(model):
        for batch in one_pass(batches):
            inputs, samples = prepare(batch)
            found += [_as_detections(sample) for sample in model(inputs, samples, mode='predict')]
    if not found:
        raise AgreementError('there was no image to compare detections on')
    return found


def _as_detections(sample: DetDataSample) -> Detections:
    instances = sample.get('pred_instances')
    if instances is None:
        raise AgreementError('the model finds no instances (pred_instances): there are no detections to compare')
    scores = instances.scores.double().cpu().numpy()
    if 'masks' in instances:
        regions = instances.masks
        # Else they are encoded already, see slab_det.deploy.
        if not isinstance(regions, list):
            regions = encode_mask_results(np.asarray(torch.as_tensor(regions).cpu()))
        # One by one: it takes 255 masks at most.
        has_area = np.array([coco_mask.area(mask) > 0 for mask in regions], bool)
    else:
        corners = instances.bboxes.double().cpu().numpy()
        regions = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1)
        has_area = (regions[:, 2:] > 0).all(1)
    # What has no area overlaps with nothing, not even with itself. A score of NaN is not above 0.
    kept = np.flatnonzero(has_area & (scores > 0))
    return Detections(scores, instances.labels.cpu().numpy(), regions).select(
        kept[np.argsort(-scores[kept], kind='stable')]
    )


def agreement(reference: Sequence[Detections], other: Sequence[Detections]) -> float:
    """The share of the AP of ``reference`` that ``other`` has, where ``reference`` decides what there is to find.

    Every detection of ``reference`` counts as a true object with its score p as the probability. A detection of
    ``other`` that is matched to it, as COCO matches detections to objects, is right with probability p, and one that
    is matched to none is wrong. The precision after the n surest detections of a class, and their recall, are

        precision(n) = 1/n sum_{i <= n} p_i,    recall(n) = sum_{i <= n} p_i / sum of all p of ``reference``,

    and AP is the mean of the interpolated precision over 101 recalls and the IoU thresholds 0.50, 0.55, ..., 0.95. That
    AP over the AP that ``reference`` itself has by this measure is the agreement of a class. Classes weigh alike, as in
    COCO's AP, but for those that are hardly there: the weight is the highest score that either detector gives a class.
    No score threshold is chosen, and the many detections of low scores that detectors without NMS have weigh little.

    Args:
        reference: Detections in each image, as :func:`detect` returns them.
        other: Those of another detector in the same images.

    Returns:
        1 where both find the same in the same order of scores; 0 where they share nothing.

    Raises:
        AgreementError: If the numbers of images differ, only one detector finds masks, or both find nothing.
    """
    if len(reference) != len(other):
        raise AgreementError(f'detections in {len(reference)} and {len(other)} images cannot be compared')
    classes = defaultdict(list)
    for mine, theirs in zip(reference, other, strict=True):
        if isinstance(mine.regions, list) != isinstance(theirs.regions, list):
            raise AgreementError('only one of the two detectors finds masks: their detections cannot be compared')
        for label in np.union1d(mine.labels, theirs.labels):
            pair = [part.select(np.flatnonzero(part.labels == label)) for part in (mine, theirs)]
            classes[label].append((pair[0].scores, pair[1].scores, _match(*pair)))
    weights, values = [], []
    for images in classes.values():
        true, scores, matched = (np.concatenate(parts, -1) for parts in zip(*images, strict=True))
        weights.append(max(true.max(initial=0.0), scores.max(initial=0.0)))
        best = _average_precision(true, true, true.sum())
        values.append(np.mean([_average_precision(scores, p, true.sum()) for p in matched]) / best if best else 0.0)
    if not values:
        raise AgreementError(f'both detectors find nothing in {len(reference)} images: agreement is undefined')
    return float(np.average(values, weights=weights))


def expected_loss(value: float) -> float:
    """The AP, of 1, that a student loses at an agreement; see :data:`LOSS`."""
    return LOSS * (1 - value) ** 2


def _match(reference: Detections, other: Detections) -> np.ndarray:
    """For each IoU threshold and each detection of ``other`` the score of its match, 0 where it has none, (10, N)."""
    matched = np.zeros((len(IOU_THRESHOLDS), len(other.scores)))
    if not (len(reference.scores) and len(other.scores)):
        return matched
    iou = coco_mask.iou(other.regions, reference.regions, [0] * len(reference.scores))
    free = np.ones((len(IOU_THRESHOLDS), len(reference.scores)), bool)
    for i, overlaps in enumerate(iou):
        near = np.flatnonzero(overlaps >= IOU_THRESHOLDS[0])
        # Thresholds with a free object near enough, and which.
        for k, threshold in enumerate(IOU_THRESHOLDS):
            open_ = near[free[k, near] & (overlaps[near] >= threshold)]
            if len(open_):
                j = open_[overlaps[open_].argmax()]
                matched[k, i], free[k, j] = reference.scores[j], False
    return matched


def _average_precision(scores: np.ndarray, p: np.ndarray, total: float) -> float:
    """AP of detections that are right with probabilities ``p``, where ``total`` objects are expected."""
    if not len(scores) or not total:
        return 0.0
    order = np.argsort(-scores, kind='stable')
    found = p[order].cumsum()
    # Equal scores have no order: only what comes after the last of them is a point of the curve.
    last = np.flatnonzero(np.diff(scores[order], append=-1.0))
    recall, precision = found[last] / total, found[last] / (last + 1)
    # COCO takes the best precision at this recall or a higher one.
    precision = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
    # Rounding must not place the last recall below 1.
    return float(precision[np.searchsorted(recall, _RECALLS - 1e-9)].mean())
