"""Estimates without labels which part of its AP a student keeps: both detectors are judged by the teacher's detections
in the mirrored images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pycocotools import mask as coco_mask

from slab_det.common.errors import ComparisonError
from slab_det.compare.detections import Detections

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
# The AP of a teacher whose AP is not known: about that of Mask R-CNNs with Swin-T and Swin-S on COCO.
ASSUMED_AP = 0.5
# With fewer detections of the teacher, the retained AP is off by 0.03 and more.
FEW_DETECTIONS = 50
# Number of groups of images of the jackknife.
GROUPS = 10
_RECALLS = np.linspace(0.0, 1.0, 101)


class RetainedAP(NamedTuple):
    """The share of the teacher's AP that a student keeps.

    Attributes:
        value: The share; 1 if nothing is lost. By chance it may be more.
        error: Its standard error, which the choice of images causes; infinity for a single image.
    """

    value: float
    error: float

    def losses(self, ap: float = ASSUMED_AP) -> tuple[float, float, float]:
        """The lost AP of a teacher with the AP ``ap``, and that at two standard errors above and below the share.

        Nobody loses more than there is, ``ap``. A gain is a negative loss, of at most ``ap``.
        """
        loss, spread = ap * (1 - self.value), 2 * ap * self.error
        return tuple(min(max(value, -ap), ap) for value in (loss, loss - spread, loss + spread))


# The scores of the true detections of a class in an image (T,), those of the other detector (N,), and for each IoU
# threshold the probability that each of these is right (10, N).
_Matches = tuple[np.ndarray, np.ndarray, np.ndarray]


def retained_ap(
    truth: Sequence[Detections], teacher: Sequence[Detections], student: Sequence[Detections]
) -> RetainedAP:
    """Estimates the share of the teacher's AP that a student keeps.

    ``truth`` are the teacher's detections in the mirrored images, mirrored back. Two good detectors differ from
    ``truth`` by chance, and about equally often. The share of the AP,

        AP(student) / AP(teacher), both with ``truth`` as the objects,

    is therefore below 1 only for what got worse. With ``truth = teacher`` it counts all that the student finds
    differently.

    A detection of ``truth`` with score p counts as an object with probability p. Other detections are matched to it as
    COCO matches detections to objects. A matched detection is right with the probability p of its match; an unmatched
    one is wrong. For the n highest scores of a class, precision and recall are

        precision(n) = 1/n sum_{i <= n} p_i,    recall(n) = sum_{i <= n} p_i / sum of all p of ``truth``,

    and AP is the mean of the interpolated precision over 101 recalls and the IoU thresholds 0.50, 0.55, ..., 0.95. In
    the mean over classes, the weight of a class is the highest score that ``truth`` gives it, so that absent classes
    count little.

    The error is that of a jackknife of g = min(``GROUPS``, N) groups of the N images, every g-th image in one: with
    a_j the share without group j, and a the mean of these, it is sqrt((g - 1) / g sum_j (a_j - a)^2).

    Args:
        truth: Detections in each image, as :func:`~slab_det.compare.detections.detect` returns them for
            ``mirrored=True``.
        teacher: Detections of the teacher in the same images.
        student: Detections of the student in the same images.

    Raises:
        ComparisonError: If the numbers of images differ, only some of the detectors find masks, or the teacher finds
            nothing of what it finds in the mirrored images.
    """
    if not len(truth) == len(teacher) == len(student):
        raise ComparisonError(
            f'detections in {len(truth)}, {len(teacher)} and {len(student)} images cannot be compared'
        )
    pairs = [[_match_classes(*pair) for pair in zip(truth, other, strict=True)] for other in (teacher, student)]
    everything = range(len(truth))
    if not _mean_ap([pairs[0][i] for i in everything]):
        found = sum(len(each.scores) for each in teacher)
        raise ComparisonError(
            f'the teacher has {found} detections in {len(truth)} images, and none of them in the mirrored images: '
            'what a student keeps of them is undefined'
        )

    def share(images: Sequence[int]) -> float:
        best, value = (_mean_ap([part[i] for i in images]) for part in pairs)
        return value / best if best else np.nan

    groups = min(GROUPS, len(truth))
    parts = [share([i for i in everything if i % groups != group]) for group in range(groups)] if groups > 1 else []
    # Without a group, nothing may be found.
    parts = np.array([part for part in parts if np.isfinite(part)])
    error = np.sqrt((groups - 1) / groups * np.square(parts - parts.mean()).sum()) if len(parts) > 1 else np.inf
    return RetainedAP(share(everything), float(error))


def describe_loss(retained: RetainedAP, num_detections: int) -> str:
    """Says what a share of the AP means where the teacher's AP is not known.

    Args:
        retained: The share.
        num_detections: Number of the teacher's detections that it rests on.
    """
    if num_detections < FEW_DETECTIONS:
        return f'the loss of AP is unknown, because {num_detections} detections are too few: give more images'
    if not np.isfinite(retained.error):
        return 'the loss of AP is unknown, because fewer than two of the compared images show objects: give more images'
    loss, low, high = (100 * value for value in retained.losses())
    return f'AP about {loss:.1f} ({low:.1f} to {high:.1f}) lower if the teacher has {100 * ASSUMED_AP:.0f}'


def _match_classes(truth: Detections, other: Detections) -> dict[int, _Matches]:
    """Matches the detections of one image, class by class."""
    if isinstance(truth.regions, list) != isinstance(other.regions, list):
        raise ComparisonError('only some of the detectors find masks: their detections cannot be compared')
    found = {}
    for label in np.union1d(truth.labels, other.labels):
        pair = [part.select(np.flatnonzero(part.labels == label)) for part in (truth, other)]
        found[int(label)] = (pair[0].scores, pair[1].scores, _match(*pair))
    return found


def _match(truth: Detections, other: Detections) -> np.ndarray:
    """Returns for each IoU threshold the score of each ``other`` detection's match, 0 if unmatched; (10, N)."""
    matched = np.zeros((len(IOU_THRESHOLDS), len(other.scores)))
    if not (len(truth.scores) and len(other.scores)):
        return matched
    iou = coco_mask.iou(other.regions, truth.regions, [0] * len(truth.scores))
    free = np.ones((len(IOU_THRESHOLDS), len(truth.scores)), bool)
    for i, overlaps in enumerate(iou):
        near = np.flatnonzero(overlaps >= IOU_THRESHOLDS[0])
        for k, threshold in enumerate(IOU_THRESHOLDS):
            open_ = near[free[k, near] & (overlaps[near] >= threshold)]
            if len(open_):
                j = open_[overlaps[open_].argmax()]
                matched[k, i], free[k, j] = truth.scores[j], False
    return matched


def _mean_ap(images: Sequence[dict[int, _Matches]]) -> float:
    """Returns the AP over images, a weighted mean over classes; 0 if there is no object."""
    weights, values = [], []
    for label in sorted({label for image in images for label in image}):
        parts = [image[label] for image in images if label in image]
        true, scores, matched = (np.concatenate(part, -1) for part in zip(*parts, strict=True))
        weights.append(true.max(initial=0.0))
        values.append(np.mean([_average_precision(scores, p, true.sum()) for p in matched]))
    return float(np.average(values, weights=weights)) if any(weights) else 0.0


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
