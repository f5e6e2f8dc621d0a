"""Which detectors have a graph of their predictions: those whose parts predict as the classes of mmdet do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from mmdet.models.dense_heads import RPNHead
from mmdet.models.detectors import TwoStageDetector
from mmdet.models.roi_heads import CascadeRoIHead, StandardRoIHead
from mmdet.models.roi_heads.base_roi_head import BaseRoIHead
from mmdet.models.roi_heads.bbox_heads import BBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmdet.models.task_modules.coders import DeltaXYWHBBoxCoder
from mmdet.models.task_modules.prior_generators import AnchorGenerator
from torch import nn

from slab_det.runtime.config import type_name
from slab_det.runtime.errors import ExportError

# The methods that a subclass may have changed.
PREDICTION = 'predict', 'predict_by_feat', '_predict_by_feat_single', '_bbox_post_process'
BOX_PREDICTION = 'predict_by_feat', '_predict_by_feat_single', 'regress_by_class'
ROI_PREDICTION = 'predict', 'predict_bbox', 'predict_mask', '_bbox_forward', '_mask_forward'
MASK_PREDICTION = 'predict_by_feat', '_predict_by_feat_single'
# The options of an NMS that change nothing, or are read.
NMS_OPTIONS = {'type', 'iou_threshold', 'split_thr', 'class_agnostic', 'offset'}


class Unsupported(ExportError):
    """A part of a detector computes something that no graph computes; the message says which."""


class Stage(NamedTuple):
    """The parts of a roi_head; a cascade has several stages."""

    bbox_roi_extractor: SingleRoIExtractor
    bbox_head: BBoxHead
    mask_roi_extractor: SingleRoIExtractor | None
    mask_head: FCNMaskHead | None


def find_stages(roi_head: BaseRoIHead) -> list[Stage]:
    """The stages of a CascadeRoIHead, or the one stage of a StandardRoIHead."""
    parts = [getattr(roi_head, name, None) for name in Stage._fields]
    if isinstance(roi_head, CascadeRoIHead):
        return [Stage(*stage) for stage in zip(*(part or [None] * roi_head.num_stages for part in parts), strict=True)]
    return [Stage(*parts)]


def check_two_stage(detector: nn.Module, cascade: bool = True) -> None:
    """Raises unless :mod:`slab_det.deployment.detection` computes what ``detector.predict`` computes.

    Args:
        detector: The detector.
        cascade: Whether its roi_head may be a cascade.

    Raises:
        Unsupported: If a part computes something else.
    """
    predict = getattr(type(detector), 'predict', None)
    _require('a detector that predicts as TwoStageDetector does', predict is TwoStageDetector.predict)
    rpn_head, roi_head = (getattr(detector, name, None) for name in ('rpn_head', 'roi_head'))
    check_kind('rpn_head', rpn_head, RPNHead)
    check_kind('roi_head', roi_head, StandardRoIHead, *[CascadeRoIHead] * cascade)
    base = CascadeRoIHead if isinstance(roi_head, CascadeRoIHead) else StandardRoIHead
    _require_prediction('an rpn_head', rpn_head, RPNHead, PREDICTION)
    _require_prediction('a roi_head', roi_head, base, ROI_PREDICTION)
    _require('an rpn_head with sigmoid scores', rpn_head.use_sigmoid_cls)
    _require('a roi_head without shared_head', not roi_head.with_shared_head)
    _require('a positive max_per_img in test_cfg.rpn', rpn_head.test_cfg.max_per_img > 0)
    _check_box_head('rpn_head', rpn_head, rpn_head.test_cfg)
    check_kind('rpn_head.prior_generator', rpn_head.prior_generator, AnchorGenerator)
    _require('anchors that are tensors', not rpn_head.prior_generator.use_box_type)
    for stage in find_stages(roi_head):
        head, extractors = stage.bbox_head, [stage.bbox_roi_extractor]
        check_kind('roi_head.bbox_head', head, BBoxHead)
        _check_box_head('roi_head.bbox_head', head, roi_head.test_cfg)
        _require_prediction('a bbox_head', head, BBoxHead, BOX_PREDICTION)
        _require('a bbox_head with softmax scores and boxes', not head.custom_cls_channels and head.with_reg)
        if detector.with_mask:
            check_kind('roi_head.mask_head', stage.mask_head, FCNMaskHead)
            _require_prediction('a mask_head', stage.mask_head, FCNMaskHead, MASK_PREDICTION)
            _require('masks of bool, of a mask_thr_binary from 0 on', roi_head.test_cfg.mask_thr_binary >= 0)
            extractors.append(stage.mask_roi_extractor)
        for extractor in extractors:
            check_kind('RoI extractor', extractor, SingleRoIExtractor)
            pools = (getattr(layer, 'pool_mode', '') == 'avg' for layer in extractor.roi_layers)
            _require("roi_layers of pool_mode='avg'", all(pools))


def _check_box_head(name: str, head: nn.Module, cfg: dict) -> None:
    coder, nms = head.bbox_coder, cfg.get('nms') or {}
    plain = type_name(nms.get('type', 'nms')) == 'nms' and not nms.get('class_agnostic') and not nms.get('offset')
    known = {'iou_threshold'} <= {*nms} <= NMS_OPTIONS
    _require(f'plain NMS per class in the test_cfg of {name}', plain and known)
    check_kind(f'{name}.bbox_coder', coder, DeltaXYWHBBoxCoder)
    decodes = type(coder).decode is DeltaXYWHBBoxCoder.decode
    _require('bbox_coders without add_ctr_clamp', decodes and not coder.add_ctr_clamp)


def check_kind(name: str, part: object, *kinds: type) -> None:
    """Raises :class:`Unsupported` if a part is of no known kind."""
    if not isinstance(part, kinds):
        names = ' or '.join(kind.__name__ for kind in kinds)
        raise Unsupported(f'a graph of detections needs {names} as {name}, not {type(part).__name__}')


def _require_prediction(what: str, part: nn.Module, base: type, methods: Iterable[str]) -> None:
    same = all(getattr(type(part), name) is getattr(base, name) for name in methods)
    _require(f'{what} that predicts as {base.__name__} does', same)


def _require(what: str, given: bool) -> None:
    if not given:
        raise Unsupported(f'a graph of detections needs {what}')
