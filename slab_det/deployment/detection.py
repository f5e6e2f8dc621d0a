"""Makes detections of what heads return: proposals, decoding and suppression, for CUDA graphs and for ONNX files.

How many boxes there are is known only while a detector runs. A CUDA graph has a place for every possible box, and gives
empty places the score :data:`EMPTY`. An ONNX file computes the boxes alone. Each has a subclass of :class:`Boxes`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from mmdet.models.dense_heads import RPNHead
from mmdet.models.roi_heads.bbox_heads import BBoxHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from torch import Tensor, nn

from slab_det.deployment.constants import constant

# The largest change of a side in mmdet's delta2bbox, as a logarithm.
MAX_LOG_RATIO = abs(math.log(16 / 1000))
# The score of a place without a box; scores of boxes are not negative.
EMPTY = -1.0


class Boxes(ABC):
    """Operators on boxes whose number depends on the image."""

    @abstractmethod
    def best(self, levels: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Chooses the ``count`` anchors of each level with the largest logits (n_i,); all for a count below 1.

        Returns:
            Scores in groups, each in descending order; the places of these anchors in the concatenation of all levels;
            and their levels, all (G, K).
        """

    @abstractmethod
    def candidates(self, scores: Tensor, corners: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Chooses the boxes (N, 4) whose scores (N,) are not ``EMPTY``.

        Returns:
            Corners (K, 4); scores (K,); places (K,); the :meth:`stride` of all boxes; and whether these K are all, or
            None where they always are.
        """

    @abstractmethod
    def suppress(
        self, corners: Tensor, scores: Tensor, groups: Tensor, stride: Tensor, iou_threshold: float, limit: int
    ) -> tuple[Tensor, Tensor]:
        """Suppresses boxes that overlap with a better one of the same group: greedy NMS.

        Args:
            corners: (G, K, 4).
            scores: (G, K), in the order of :meth:`best`.
            groups: The level or the label of each box, (G, K).
            stride: How far :func:`set_apart` moves each group from the one before.
            iou_threshold: Overlaps are larger.
            limit: Largest number of boxes that stay.

        Returns:
            Scores (n,) of the best boxes of all groups in descending order, and their places in (G * K).
        """

    @abstractmethod
    def pool(
        self, extractor: SingleRoIExtractor, features: Sequence[Tensor], boxes: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Pools every box (n, 4) from its level of the pyramid by RoIAlign (FPN, Lin et al., CVPR 2017, eq. 1).

        Returns:
            Regions (n, C, h, w), and the place of each region's box, (n,), or None where the orders are the same.
        """

    def class_scores(self, logits: Tensor, found: Tensor, score_thr: float | Tensor) -> Tensor:
        """Scores (P, classes) of logits (P, classes + 1), ``EMPTY`` up to ``score_thr`` and where ``found`` (P,) is."""
        scores = logits.softmax(-1)[:, :-1]
        return torch.where((scores > score_thr) & (found > EMPTY)[:, None], scores, EMPTY)

    def decode(
        self, coder: nn.Module, priors: Tensor, deltas: Tensor, limits: Tensor, place: Tensor | None = None
    ) -> Tensor:
        """Corners of boxes, ``center + delta * size`` and ``size * exp(delta)``, clipped to the image.

        See R-CNN (Girshick et al., CVPR 2014), appendix C.

        Args:
            coder: The DeltaXYWHBBoxCoder.
            priors: Corners, (A, 4).
            deltas: (A, 4) with places, (A, n, 4) without.
            limits: The image's (width, height, width, height).
            place: Which of the A boxes are decoded, (...); None for all.

        Returns:
            (..., 4), or (A, n, 4).
        """
        priors, deltas = (priors[:, None], deltas) if place is None else (priors[place], deltas[place])
        stds, means = (numbers(tuple(values), deltas.device, deltas.dtype) for values in (coder.stds, coder.means))
        deltas = deltas * stds + means
        low, high = priors[..., :2], priors[..., 2:]
        size = high - low
        center = (low + high) * 0.5 + size * deltas[..., :2]
        half = size * deltas[..., 2:].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * 0.5
        decoded = torch.cat([center - half, center + half], -1)
        return torch.minimum(decoded.clamp(min=0), limits) if coder.clip_border else decoded

    def stride(self, corners: Tensor, scores: Tensor) -> Tensor:
        """How far mmcv's batched NMS moves each group from the one before: the largest coordinate plus 1."""
        corners = torch.where((scores > EMPTY)[..., None], corners, 0.0)
        # Without boxes, the largest coordinate is this zero.
        return torch.cat([corners.reshape(-1), corners.new_zeros(1)]).max() + 1


def propose(
    boxes: Boxes, head: RPNHead, levels: Sequence[Tensor], deltas: Tensor, priors: Tensor, limits: Tensor
) -> tuple[Tensor, Tensor]:
    """Decodes and suppresses the best anchors of each level (Ren et al., NeurIPS 2015).

    Args:
        boxes: The operators.
        head: The RPN.
        levels: The logits of the anchors of each level, (n_i,).
        deltas: The deltas of the A anchors of all levels, (A, 4).
        priors: The anchors, (A, 4).
        limits: The image's (width, height, width, height).

    Returns:
        Corners (n, 4) and scores (n,) of the proposals, best first.
    """
    cfg = head.test_cfg
    scores, place, level = boxes.best(levels, cfg.get('nms_pre', -1))
    corners = boxes.decode(head.bbox_coder, priors, deltas, limits, place)
    smallest = cfg.get('min_bbox_size', -1)
    if smallest >= 0:
        scores = torch.where((corners[..., 2:] - corners[..., :2]).amin(-1) > smallest, scores, EMPTY)
    stride = boxes.stride(corners, scores)
    scores, index = boxes.suppress(corners, scores, level, stride, cfg.nms.iou_threshold, cfg.max_per_img)
    return corners.reshape(-1, 4)[index], scores


def detect_regions(
    boxes: Boxes,
    head: BBoxHead,
    cfg: dict,
    logits: Tensor,
    deltas: Tensor,
    proposals: tuple[Tensor, Tensor],
    limits: Tensor,
    rescale: Tensor | None,
    score_thr: float | Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Decodes the outputs of a bbox_head, suppresses boxes of each class, and returns the best of all classes.

    Args:
        boxes: The operators.
        head: The head.
        cfg: ``test_cfg.rcnn``.
        logits: (P, classes + 1).
        deltas: (P, 4 classes), or (P, 4) for a head that is class-agnostic.
        proposals: Corners and scores of the P proposals.
        limits: The image's (width, height, width, height).
        rescale: Factors (4,) to the original image, or None.
        score_thr: Objects have a larger score.

    Returns:
        Corners, scores and labels, and whether mmdet would return the same; None if :meth:`Boxes.candidates` does.
    """
    proposed, found = proposals
    scores = boxes.class_scores(logits, found, score_thr)
    classes = head.num_classes
    deltas = deltas.reshape(-1, 1 if head.reg_class_agnostic else classes, 4)
    corners = boxes.decode(head.bbox_coder, proposed, deltas, limits)
    corners = corners if rescale is None else corners * rescale
    if head.reg_class_agnostic:
        corners = corners.expand(-1, classes, 4)
    corners, scores, place, stride, enough = boxes.candidates(scores.reshape(-1), corners.reshape(-1, 4))
    label, limit = place % classes, cfg['max_per_img']
    iou_threshold = cfg['nms']['iou_threshold']
    scores, index = boxes.suppress(corners[None], scores[None], label[None], stride, iou_threshold, limit)
    if enough is not None:
        if limit == len(scores):
            # The best candidates suppress each other in the same way with worse ones and without.
            enough = enough | (scores > EMPTY).all()
        # mmcv suppresses no box if a coordinate is not a number.
        enough = enough & stride.isfinite()
    return corners[index], scores, label[index], enough


def flat(x: Tensor, channels: int) -> Tensor:
    """Maps (N, n * channels, H, W) with a row for each anchor, (N * H * W * n, channels)."""
    return x.permute(0, 2, 3, 1).reshape(-1, channels)


def map_levels(extractor: SingleRoIExtractor, boxes: Tensor) -> Tensor:
    """The level of the pyramid that each box (n, 4) is pooled from, (n,)."""
    scale = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
    # log(0) of an empty box is -inf, which no integer holds: the epsilon comes first.
    level = torch.log2(scale / extractor.finest_scale + 1e-6).floor()
    return level.clamp(0, len(extractor.roi_layers) - 1).to(torch.int64)


@constant
def numbers(values: tuple, device: torch.device, dtype: torch.dtype) -> Tensor:
    """A tensor of these numbers, which is kept: a captured function cannot copy numbers to its device."""
    return torch.tensor(values, dtype=dtype, device=device)


def set_apart(corners: Tensor, scores: Tensor, groups: Tensor, stride: Tensor) -> Tensor:
    """Moves boxes (..., 4) of each group away from all other groups, with the rounding of mmcv.

    Places without a box get a box without area, which suppresses nothing.
    """
    moved = corners + (groups.to(corners.dtype) * stride)[..., None]
    return torch.where((scores > EMPTY)[..., None], moved, 0.0)
