"""From dense maps to detections: proposals, decoding and suppression, for CUDA graphs and for ONNX.

How many boxes there are is known only while a detector runs. :class:`Boxes` says how a form of deployment deals with
that: a CUDA graph computes every place that could hold a box and marks empty ones with the score :data:`EMPTY`; a graph
of ONNX computes the boxes that there are. Everything else is written once, here.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from mmdet.models.dense_heads import RPNHead
from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
from mmdet.models.detectors import SingleStageDetector, TwoStageDetector
from mmdet.models.roi_heads import CascadeRoIHead, StandardRoIHead
from mmdet.models.roi_heads.base_roi_head import BaseRoIHead
from mmdet.models.roi_heads.bbox_heads import BBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmdet.models.task_modules.coders import DeltaXYWHBBoxCoder, DistancePointBBoxCoder
from mmdet.models.task_modules.prior_generators import AnchorGenerator, MlvlPointGenerator
from torch import Tensor, nn

from slab_det.deployment.constants import constant
from slab_det.runtime.config import type_name

# mmdet's delta2bbox: no side changes by more than this.
MAX_LOG_RATIO = abs(math.log(16 / 1000))
# The score of a place without a box; scores of boxes are not negative.
EMPTY = -1.0
# Corners and scores of boxes.
Found = tuple[Tensor, Tensor]


class Boxes(ABC):
    """Operators on boxes whose number depends on the image."""

    @abstractmethod
    def priors(self, head: BaseDenseHead, maps: Sequence[Tensor]) -> Tensor:
        """The anchors (A, 4) or points (A, 2) of all levels, for maps (1, C, H, W) of their sizes."""

    @abstractmethod
    def best(
        self, levels: Sequence[Tensor], count: int, activation: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best values of each level.

        Args:
            levels: The values of each level, (n_i,).
            count: How many of each level at most.
            activation: What makes scores of values; it keeps their order.

        Returns:
            Scores in descending order within a group, (G, K); their places behind each other in all levels, (G, K);
            and their levels.
        """

    @abstractmethod
    def candidates(
        self, scores: Tensor, corners_of: Callable[[Tensor | None], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """The boxes whose scores (N,) are not ``EMPTY``.

        Args:
            scores: (N,).
            corners_of: A function: the corners at some places, or all (N, 4) for None.

        Returns:
            Corners (K, 4); scores (K,); places (K,); the :meth:`stride` of all boxes; and whether K sufficed for all,
            or None where it always does.
        """

    @abstractmethod
    def suppress(
        self, corners: Tensor, scores: Tensor, groups: Tensor, stride: Tensor, iou_threshold: float, limit: int
    ) -> tuple[Tensor, Tensor]:
        """Greedy NMS of boxes of the same group.

        Args:
            corners: (G, K, 4).
            scores: (G, K), of the order of :meth:`best`.
            groups: The level or the label of each box, (G, K).
            stride: How far :func:`set_apart` moves the boxes of a group.
            iou_threshold: A box goes if it overlaps a better one of its group by more.
            limit: How many boxes stay, at most.

        Returns:
            Scores (n,) of the best boxes of all groups in descending order, and their places in (G * K).
        """

    @abstractmethod
    def pool(
        self, extractor: SingleRoIExtractor, features: Sequence[Tensor], boxes: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """RoIAlign of every box (n, 4) on its level of the pyramid (FPN, Lin et al., CVPR 2017, eq. 1).

        Returns:
            Regions (n, C, h, w), and the box that each belongs to, (n,); None where they are in the order of boxes.
        """

    def class_scores(self, logits: Tensor, found: Tensor, score_thr: float | Tensor) -> Tensor:
        """Scores (P, classes) of logits (P, classes + 1), ``EMPTY`` up to ``score_thr`` and in empty places."""
        scores = logits.softmax(-1)[:, :-1]
        return torch.where((scores > score_thr) & (found > EMPTY)[:, None], scores, EMPTY)

    def decode(
        self, coder: nn.Module, priors: Tensor, values: Tensor, limits: Tensor, place: Tensor | None = None
    ) -> Tensor:
        """Decodes what a head says of priors; see :func:`decode`.

        Args:
            coder: The coder.
            priors: (A, 4) or (A, 2).
            values: (A, 4) with places, (A, n, 4) without.
            limits: The image's (width, height, width, height).
            place: Which of the A are decoded, (...); all without.

        Returns:
            (..., 4), or (A, n, 4).
        """
        if place is None:
            return decode(coder, priors[:, None], values, limits)
        return decode(coder, priors[place], values[place], limits)

    def stride(self, corners: Tensor, scores: Tensor) -> Tensor:
        """How far mmcv's batched NMS moves the boxes of a group: one more than the largest coordinate of all."""
        corners = torch.where((scores > EMPTY)[..., None], corners, 0.0)
        # The zero is for no places at all.
        return torch.cat([corners.reshape(-1), corners.new_zeros(1)]).max() + 1


def propose(
    boxes: Boxes, head: RPNHead, levels: Sequence[Tensor], deltas: Tensor, priors: Tensor, limits: Tensor
) -> Found:
    """The best anchors of each level, decoded and suppressed (Ren et al., NeurIPS 2015): corners and scores.

    Args:
        boxes: The form of deployment.
        head: The RPN.
        levels: The logits of the anchors of each level, (n_i,).
        deltas: Of the A anchors of all levels, (A, 4).
        priors: The anchors, (A, 4).
        limits: The image's (width, height, width, height).
    """
    cfg = head.test_cfg
    scores, place, level = boxes.best(levels, cfg.get('nms_pre', -1), torch.sigmoid)
    corners = boxes.decode(head.bbox_coder, priors, deltas, limits, place)
    scores = drop_small(corners, scores, cfg)
    stride = boxes.stride(corners, scores)
    kept, index = boxes.suppress(corners, scores, level, stride, cfg.nms.iou_threshold, cfg.max_per_img)
    return corners.reshape(-1, 4)[index], kept


def detect_dense(
    boxes: Boxes, head: BaseDenseHead, outputs: Sequence[Sequence[Tensor]], limits: Tensor, rescale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The objects that a head without regions finds, as BaseDenseHead predicts them.

    Args:
        boxes: The form of deployment.
        head: RetinaNet's, RTMDet's or one like them.
        outputs: What it puts out for each level: class logits, boxes and perhaps centerness.
        limits: The image's (width, height, width, height).
        rescale: Factors (4,) to the original image.

    Returns:
        Corners, scores and labels, and whether they are all (see :meth:`Boxes.candidates`).
    """
    cfg, classes = head.test_cfg, head.cls_out_channels - (not head.use_sigmoid_cls)
    levels = []
    for logits in outputs[0]:
        logits = flat(logits, head.cls_out_channels)
        scores = logits.sigmoid() if head.use_sigmoid_cls else logits.softmax(-1)[:, :-1]
        levels.append(torch.where(scores > cfg.get('score_thr', 0), scores, EMPTY).reshape(-1))
    scores, place, _ = boxes.best(levels, cfg.nms_pre, lambda x: x)
    scores, place = scores.reshape(-1), place.reshape(-1)
    prior, label = torch.div(place, classes, rounding_mode='floor'), place % classes
    regressed = torch.cat([flat(x, 4) for x in outputs[1]])
    corners = boxes.decode(head.bbox_coder, boxes.priors(head, outputs[0]), regressed, limits, prior) * rescale
    if len(outputs) > 2:
        factor = torch.cat([flat(x, 1)[:, 0].sigmoid() for x in outputs[2]])[prior]
        scores = torch.where(scores > EMPTY, scores * factor, EMPTY)
    scores = drop_small(corners, scores, cfg)

    def corners_of(place: Tensor | None) -> Tensor:
        return corners if place is None else corners[place]

    return _choose(boxes, corners_of, scores, lambda place: label[place], cfg)


def detect_regions(
    boxes: Boxes,
    head: BBoxHead,
    cfg: dict,
    logits: Tensor,
    deltas: Tensor,
    proposals: Found,
    limits: Tensor,
    rescale: Tensor | None,
    score_thr: float | Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The objects of what a bbox_head says of each proposal; see :func:`detect_dense`.

    Args:
        boxes: The form of deployment.
        head: The head.
        cfg: ``test_cfg.rcnn``.
        logits: (P, classes + 1).
        deltas: (P, 4 classes), or (P, 4) where they are the same for all classes.
        proposals: Corners and scores of the P proposals.
        limits: The image's (width, height, width, height).
        rescale: Factors (4,) to the original image, or None.
        score_thr: Smallest score of an object.
    """
    proposed, found = proposals
    scores = boxes.class_scores(logits, found, score_thr)
    classes = head.num_classes
    deltas = deltas.reshape(-1, 1 if head.reg_class_agnostic else classes, 4)

    def corners_of(place: Tensor | None) -> Tensor:
        if place is None:
            corners = boxes.decode(head.bbox_coder, proposed, deltas, limits)
            corners = corners if rescale is None else corners * rescale
            return corners.expand(-1, classes, 4).reshape(-1, 4)
        box = torch.div(place, classes, rounding_mode='floor')
        values = deltas[box, torch.zeros_like(box) if head.reg_class_agnostic else place % classes]
        corners = decode(head.bbox_coder, proposed[box], values, limits)
        return corners if rescale is None else corners * rescale

    return _choose(boxes, corners_of, scores.reshape(-1), lambda place: place % classes, cfg)


def _choose(
    boxes: Boxes, corners_of: Callable, scores: Tensor, label_of: Callable[[Tensor], Tensor], cfg: dict
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The best objects of all classes, suppressed in each; cfg has ``nms`` and ``max_per_img``."""
    corners, kept, place, stride, enough = boxes.candidates(scores, corners_of)
    label, iou_threshold, limit = label_of(place), cfg['nms']['iou_threshold'], cfg['max_per_img']
    kept, index = boxes.suppress(corners[None], kept[None], label[None], stride, iou_threshold, limit)
    if enough is not None and limit == len(kept):
        # The best candidates suppress each other in the same way, whether worse ones are there or not.
        enough = enough | (kept > EMPTY).all()
    if enough is not None:
        # Of boxes that are no numbers, mmcv suppresses none.
        enough = enough & stride.isfinite()
    return corners[index], kept, label[index], enough


def refine(boxes: Boxes, head: BBoxHead, logits: Tensor, deltas: Tensor, proposals: Tensor, limits: Tensor) -> Tensor:
    """The proposals (P, 4) of the next stage (Cascade R-CNN, Cai and Vasconcelos, CVPR 2018)."""
    deltas = deltas.reshape(deltas.shape[0], -1, 4)
    if not head.reg_class_agnostic:
        label = logits[:, :-1].argmax(1)
        deltas = deltas.gather(1, label[:, None, None].expand(-1, 1, 4))
    return boxes.decode(head.bbox_coder, proposals, deltas, limits)[:, 0]


def settings(cfg: dict) -> tuple:
    """The values of a ``test_cfg`` that detections depend on."""
    nms = cfg.get('nms') or {}
    names = 'nms_pre', 'score_thr', 'min_bbox_size', 'max_per_img'
    return *(cfg.get(name) for name in names), nms.get('iou_threshold')


def flat(x: Tensor, channels: int) -> Tensor:
    """A map (1, n * channels, H, W) with a row for each anchor, (H * W * n, channels)."""
    return x.permute(0, 2, 3, 1).reshape(-1, channels)


def map_levels(extractor: SingleRoIExtractor, boxes: Tensor) -> Tensor:
    """The level of the pyramid that each box (n, 4) is pooled from, (n,)."""
    scale = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
    # log(0) of an empty box is -inf, which no integer holds: the epsilon comes first.
    level = torch.log2(scale / extractor.finest_scale + 1e-6).floor()
    return level.clamp(0, len(extractor.roi_layers) - 1).to(torch.int64)


def decode(coder: nn.Module, priors: Tensor, values: Tensor, limits: Tensor) -> Tensor:
    """Corners (..., 4) of boxes, clipped to the image.

    Deltas (R-CNN, Girshick et al., CVPR 2014, appendix C) are ``center + delta * size`` and ``size * exp(delta)``;
    distances (FCOS, Tian et al., ICCV 2019) reach from a point to each side.

    Args:
        coder: DeltaXYWHBBoxCoder or DistancePointBBoxCoder.
        priors: Corners (..., 4) or points (..., 2).
        values: (..., 4).
        limits: The image's (width, height, width, height).
    """
    if isinstance(coder, DistancePointBBoxCoder):
        decoded = torch.cat([priors - values[..., :2], priors + values[..., 2:]], -1)
    else:
        values = values * numbers(coder.stds, values.device, values.dtype)
        values = values + numbers(coder.means, values.device, values.dtype)
        low, high = priors[..., :2], priors[..., 2:]
        size = high - low
        center = (low + high) * 0.5 + size * values[..., :2]
        half = size * values[..., 2:].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * 0.5
        decoded = torch.cat([center - half, center + half], -1)
    return torch.minimum(decoded.clamp(min=0), limits) if coder.clip_border else decoded


def numbers(values: Iterable[float], device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of these numbers: a CUDA graph cannot bring numbers to its device."""
    values = tuple(values)
    return constant((values, device, dtype), lambda: torch.tensor(values, dtype=dtype, device=device))


def drop_small(corners: Tensor, scores: Tensor, cfg: dict) -> Tensor:
    """The scores (...) of boxes (..., 4), ``EMPTY`` for those with a side of at most ``min_bbox_size``."""
    smallest = cfg.get('min_bbox_size', -1)
    if smallest < 0:
        return scores
    return torch.where((corners[..., 2:] - corners[..., :2]).amin(-1) > smallest, scores, EMPTY)


def set_apart(corners: Tensor, scores: Tensor, groups: Tensor, stride: Tensor) -> Tensor:
    """Boxes (..., 4), those of each group moved to a place of their own, as mmcv moves them, rounding included.

    Places without a box get one without area, which suppresses nothing.
    """
    moved = corners + (groups.to(corners.dtype) * stride)[..., None]
    return torch.where((scores > EMPTY)[..., None], moved, 0.0)


class Unsupported(ValueError):
    """A part of a detector computes something that is not written here; the message says which."""


# What a subclass may have changed.
PREDICTION = ('predict', 'predict_by_feat', '_predict_by_feat_single', '_bbox_post_process')
BOX_PREDICTION = 'predict_by_feat', '_predict_by_feat_single', 'regress_by_class'
ROI_PREDICTION = ('predict', 'predict_bbox', 'predict_mask', '_bbox_forward', '_mask_forward')


class Stage(NamedTuple):
    """The parts of a roi_head; a cascade has several of them."""

    bbox_roi_extractor: SingleRoIExtractor
    bbox_head: BBoxHead
    mask_roi_extractor: SingleRoIExtractor | None
    mask_head: FCNMaskHead | None


def find_stages(roi_head: BaseRoIHead) -> list[Stage]:
    """The stages of a StandardRoIHead, which is one, or of a CascadeRoIHead."""
    parts = [getattr(roi_head, name, None) for name in Stage._fields]
    if isinstance(roi_head, CascadeRoIHead):
        return [Stage(*stage) for stage in zip(*(part or [None] * roi_head.num_stages for part in parts), strict=True)]
    return [Stage(*parts)]


def check_two_stage(detector: nn.Module, cascade: bool = True) -> None:
    """Raises unless this module computes what ``detector.predict`` computes.

    Args:
        detector: A two-stage detector.
        cascade: Whether its roi_head may be a cascade.

    Raises:
        Unsupported: If a part computes something else.
    """
    kinds = (StandardRoIHead, CascadeRoIHead) if cascade else (StandardRoIHead,)
    check_kind('roi_head', getattr(detector, 'roi_head', None), *kinds)
    rpn_head, roi_head = detector.rpn_head, detector.roi_head
    check_kind('rpn_head', rpn_head, RPNHead)
    base = CascadeRoIHead if isinstance(roi_head, CascadeRoIHead) else StandardRoIHead
    needed = {
        'a detector that predicts as TwoStageDetector does': type(detector).predict is TwoStageDetector.predict,
        'an rpn_head that predicts as RPNHead does': _predicts_as(rpn_head, RPNHead, PREDICTION),
        'an rpn_head with sigmoid scores': rpn_head.use_sigmoid_cls,
        f'a roi_head that predicts as {base.__name__} does': _predicts_as(roi_head, base, ROI_PREDICTION),
        'a roi_head without shared_head': not roi_head.with_shared_head,
        'a positive max_per_img in test_cfg.rpn': rpn_head.test_cfg.max_per_img > 0,
    }
    _check(needed)
    _check_box_head('rpn_head', rpn_head, rpn_head.test_cfg)
    for stage in find_stages(roi_head):
        _check_box_head('roi_head.bbox_head', stage.bbox_head, roi_head.test_cfg)
        check_kind('roi_head.bbox_roi_extractor', stage.bbox_roi_extractor, SingleRoIExtractor)
        extractors = [stage.bbox_roi_extractor]
        check_kind('roi_head.bbox_head', stage.bbox_head, BBoxHead)
        needed = {
            'a bbox_head that predicts as BBoxHead does': _predicts_as(stage.bbox_head, BBoxHead, BOX_PREDICTION),
            'a bbox_head with softmax scores and boxes': not stage.bbox_head.custom_cls_channels
            and stage.bbox_head.with_reg,
        }
        if detector.with_mask:
            check_kind('roi_head.mask_head', stage.mask_head, FCNMaskHead)
            check_kind('roi_head.mask_roi_extractor', stage.mask_roi_extractor, SingleRoIExtractor)
            pastes = 'predict_by_feat', '_predict_by_feat_single'
            needed['masks of bool, of a mask_thr_binary from 0 on'] = roi_head.test_cfg.mask_thr_binary >= 0
            needed['a mask_head that predicts as FCNMaskHead does'] = _predicts_as(stage.mask_head, FCNMaskHead, pastes)
            extractors.append(stage.mask_roi_extractor)
        layers = [layer for extractor in extractors for layer in extractor.roi_layers]
        needed["roi_layers of pool_mode='avg'"] = all(getattr(layer, 'pool_mode', '') == 'avg' for layer in layers)
        _check(needed)


def check_single_stage(detector: nn.Module) -> None:
    """Raises unless this module computes what ``detector.predict`` computes; see :func:`check_two_stage`."""
    head = getattr(detector, 'bbox_head', None)
    check_kind('bbox_head', head, BaseDenseHead)
    cfg = head.test_cfg
    _check_box_head('bbox_head', head, cfg)
    needed = {
        'a detector that predicts as SingleStageDetector does': type(detector).predict is SingleStageDetector.predict,
        'a bbox_head that predicts as BaseDenseHead does': _predicts_as(head, BaseDenseHead, PREDICTION),
        'a bbox_head with sigmoid or softmax scores': not getattr(head.loss_cls, 'custom_cls_channels', False),
        'positive nms_pre and max_per_img in test_cfg': min(cfg.get('nms_pre', -1), cfg.get('max_per_img', -1)) > 0,
    }
    _check(needed)


def _check_box_head(name: str, head: nn.Module, cfg: dict) -> None:
    coder, nms = head.bbox_coder, cfg.get('nms') or {}
    check_kind(f'{name}.bbox_coder', coder, DeltaXYWHBBoxCoder, DistancePointBBoxCoder)
    if isinstance(head, BaseDenseHead):
        check_kind(f'{name}.prior_generator', head.prior_generator, AnchorGenerator, MlvlPointGenerator)
    known = {'type', 'iou_threshold', 'split_thr', 'class_agnostic', 'offset'}
    plain = type_name(nms.get('type', 'nms')) == 'nms' and not nms.get('class_agnostic') and not nms.get('offset')
    own = type(coder).decode in (DeltaXYWHBBoxCoder.decode, DistancePointBBoxCoder.decode)
    _check(
        {
            f'plain NMS per class in the test_cfg of {name}': plain and {'iou_threshold'} <= {*nms} <= known,
            'bbox_coders without add_ctr_clamp': own and not getattr(coder, 'add_ctr_clamp', False),
            'anchors that are tensors': not getattr(getattr(head, 'prior_generator', None), 'use_box_type', False),
        }
    )


def _predicts_as(part: nn.Module, base: type, methods: Iterable[str]) -> bool:
    return all(getattr(type(part), name) is getattr(base, name) for name in methods)


def check_kind(name: str, part: object, *kinds: type) -> None:
    """Raises :class:`Unsupported` if a part is of no known kind."""
    if not isinstance(part, kinds):
        names = ' or '.join(kind.__name__ for kind in kinds)
        raise Unsupported(f'{name} is a {type(part).__name__}, not a {names}')


def _check(needed: dict[str, bool]) -> None:
    for what, given in needed.items():
        if not given:
            raise Unsupported(f'it has not {what}')
