"""Compares the detections of a student and its teacher on images without labels, and estimates the loss of AP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from mmdet.structures import DetDataSample
from mmdet.structures.mask import encode_mask_results
from pycocotools import mask as coco_mask
from torch import nn

from slab_det.runtime.batches import one_pass, prepare_inputs
from slab_det.runtime.errors import AgreementError
from slab_det.runtime.modes import evaluating

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
# The loss of AP is about LOSS (AP (1 - agreement))^2, AP being the teacher's: a least-squares fit to students of
# teachers with an AP of 0.12 to 0.57 (python -m benchmarks.absorb.loss).
LOSS = 2.5
LOSS_EVIDENCE = 'Of 54 students, 87 % lost at most 1 AP more than expected.'
# The AP of a teacher whose AP is not known: about that of Mask R-CNNs with Swin-T and Swin-S on COCO.
ASSUMED_AP = 0.5
# A student with this agreement loses less than can be measured, 0.002 AP of 0.5.
LEAST_AGREEMENT = 0.95
# With fewer detections of the teacher, an agreement is off by 0.03 and more.
FEW_DETECTIONS = 50
# Number of groups of images in :func:`agreement_error`.
GROUPS = 10
_RECALLS = np.linspace(0.0, 1.0, 101)


@dataclass(frozen=True)
class Detections:
    """The detections of one image, highest score first.

    Attributes:
        scores: (N,), in (0, 1].
        labels: Class of each detection, (N,).
        regions: Boxes (x, y, width, height), (N, 4), or N masks in COCO's run-length encoding.
    """

    scores: np.ndarray
    labels: np.ndarray
    regions: np.ndarray | list[dict]

    def select(self, indices: np.ndarray) -> Detections:
        """Returns the detections with these indices, in the order of the indices."""
        masks = isinstance(self.regions, list)
        regions = [self.regions[i] for i in indices] if masks else self.regions[indices]
        return Detections(self.scores[indices], self.labels[indices], regions)


@torch.no_grad()
def detect(model: nn.Module, batches: Iterable) -> list[Detections]:
    """Runs a detector in eval mode and returns its detections.

    Args:
        model: A detector.
        batches: Batches of a data loader, or normalised images (B, 3, H, W).

    Returns:
        The detections of each image, with masks if the detector has them, otherwise with boxes.

    Raises:
        AgreementError: If there is no image, or ``model`` predicts no instances (such as a semantic segmentor).
    """
    prepare, found = prepare_inputs(model, batches), []
    with evaluating(model):
        for batch in one_pass(batches):
            inputs, samples = prepare(batch)
            found += [as_detections(sample) for sample in model(inputs, samples, mode='predict')]
    if not found:
        raise AgreementError('there was no image to compare detections on')
    return found


def as_detections(sample: DetDataSample) -> Detections:
    """Returns the detections of a predicted sample, with masks if it has them; raises as :func:`detect`."""
    instances = sample.get('pred_instances')
    if instances is None:
        raise AgreementError('the model predicts no pred_instances: there are no detections to compare')
    scores = instances.scores.double().cpu().numpy()
    if 'masks' in instances:
        regions = instances.masks
        # slab_det.deploy(masks='rle') returns encoded masks.
        if not isinstance(regions, list):
            regions = encode_mask_results(np.asarray(torch.as_tensor(regions).cpu()))
        # One by one: coco_mask.area takes at most 255 masks.
        has_area = np.array([coco_mask.area(mask) > 0 for mask in regions], bool)
    else:
        corners = instances.bboxes.double().cpu().numpy()
        regions = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1)
        has_area = (regions[:, 2:] > 0).all(1)
    # A region without area overlaps with nothing. The comparison also drops NaN scores.
    valid = np.flatnonzero(has_area & (scores > 0))
    order = valid[np.argsort(-scores[valid], kind='stable')]
    return Detections(scores, instances.labels.cpu().numpy(), regions).select(order)


def agreement(reference: Sequence[Detections], other: Sequence[Detections]) -> float:
    """Returns the AP of ``other`` over the AP of ``reference``, both with ``reference`` as the ground truth.

    A detection of ``reference`` with score p counts as an object with probability p. Detections of ``other`` are
    matched to detections of ``reference`` as COCO matches them to objects. A matched detection is right with the
    probability p of its match; an unmatched one is wrong. For the n highest scores of a class, precision and recall are

        precision(n) = 1/n sum_{i <= n} p_i,    recall(n) = sum_{i <= n} p_i / sum of all p of ``reference``,

    and AP is the mean of the interpolated precision over 101 recalls and the IoU thresholds 0.50, 0.55, ..., 0.95. In
    the mean over classes, the weight of a class is the highest score that either detector gives it, so absent classes
    count little.

    Args:
        reference: Detections in each image, as :func:`detect` returns them.
        other: Detections of another detector in the same images.

    Returns:
        1 if both find the same regions in the same order of scores; 0 if no detection matches.

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


def agreement_error(reference: Sequence[Detections], other: Sequence[Detections]) -> float:
    """Estimates the standard error of :func:`agreement` that the choice of images causes.

    The images are divided into g = min(``GROUPS``, N) groups, every g-th image in one. With a_j the agreement without
    group j, and a the mean of these, the error is the jackknife's, sqrt((g - 1) / g sum_j (a_j - a)^2).

    Args:
        reference: Detections in each of N images.
        other: Detections of another detector in the same images.

    Returns:
        The error; infinity for a single image.

    Raises:
        AgreementError: See :func:`agreement`.
    """
    groups = min(GROUPS, len(reference))
    if groups < 2:
        return float('inf')
    values = []
    for group in range(groups):
        rest = [i for i in range(len(reference)) if i % groups != group]
        with suppress(AgreementError):  # nothing is found without this group
            values.append(agreement([reference[i] for i in rest], [other[i] for i in rest]))
    return float(np.sqrt((groups - 1) / groups * np.square(values - np.mean(values)).sum())) if values else float('inf')


def expected_loss(value: float, ap: float = ASSUMED_AP) -> float:
    """Estimates the AP, in [0, 1], that a student with this agreement loses if its teacher has the AP ``ap``.

    The loss grows with the square of the teacher's AP: a teacher that is seldom right loses little to another one that
    is as seldom right elsewhere. It is at most ``ap``.
    """
    return min(LOSS * (ap * (1 - value)) ** 2, ap)


def describe_loss(value: float, num_detections: int, held_out: bool = True) -> str:
    """Says what an agreement means where the teacher's AP is not known.

    Args:
        value: The agreement.
        num_detections: Number of the teacher's detections that it rests on.
        held_out: Whether the images were held out from all fits.
    """
    if not held_out:
        return 'the loss of AP is unknown, because nothing was held out: give at least 5 batches of images'
    if num_detections < FEW_DETECTIONS:
        return f'the loss of AP is unknown, because {num_detections} detections are too few: give more images'
    return f'AP about {100 * expected_loss(value):.1f} lower if the teacher has {100 * ASSUMED_AP:.0f}'


def least_agreement(loss: float, ap: float = ASSUMED_AP) -> float:
    """The inverse of :func:`expected_loss`."""
    return 1 - (loss / LOSS) ** 0.5 / ap


def _match(reference: Detections, other: Detections) -> np.ndarray:
    """Returns for each IoU threshold the score of each ``other`` detection's match, 0 if unmatched; (10, N)."""
    matched = np.zeros((len(IOU_THRESHOLDS), len(other.scores)))
    if not (len(reference.scores) and len(other.scores)):
        return matched
    iou = coco_mask.iou(other.regions, reference.regions, [0] * len(reference.scores))
    free = np.ones((len(IOU_THRESHOLDS), len(reference.scores)), bool)
    for i, overlaps in enumerate(iou):
        near = np.flatnonzero(overlaps >= IOU_THRESHOLDS[0])
        for k, threshold in enumerate(IOU_THRESHOLDS):
            open_ = near[free[k, near] & (overlaps[near] >= threshold)]
            if len(open_):
                j = open_[overlaps[open_].argmax()]
                matched[k, i], free[k, j] = reference.scores[j], False
    return matched


def _average_precision(scores: np.ndarray, p: np.ndarray, total: float) -> float:
    """Returns the AP of detections that are right with probabilities ``p``, where ``total`` objects are expected."""
    if not len(scores) or not total:
        return 0.0
    order = np.argsort(-scores, kind='stable')
    found = p[order].cumsum()
    # Detections of equal scores have no order, so only the last of them is a point of the curve.
    last = np.flatnonzero(np.diff(scores[order], append=-1.0))
    recall, precision = found[last] / total, found[last] / (last + 1)
    # The interpolated precision of COCO: the best one at this recall or any higher recall.
    precision = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
    # The tolerance keeps rounding from placing the last recall below 1.
    return float(precision[np.searchsorted(recall, _RECALLS - 1e-9)].mean())
