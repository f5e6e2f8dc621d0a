"""Checks whether a CUDA graph or an ONNX file can compute a detector, whose parts must predict as mmdet's do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mmdet.models.dense_heads import RPNHead
from mmdet.models.detectors import TwoStageDetector
from mmdet.models.roi_heads import StandardRoIHead
from mmdet.models.roi_heads.bbox_heads import BBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmdet.models.task_modules.coders import DeltaXYWHBBoxCoder
from mmdet.models.task_modules.prior_generators import AnchorGenerator
from torch import nn

from slab_det.runtime.config import type_name
from slab_det.runtime.errors import ExportError

# The methods that predict: a subclass may override any other method.
DENSE_PREDICTION = 'predict', 'predict_by_feat', '_predict_by_feat_single', '_bbox_post_process'
BOX_PREDICTION = 'predict_by_feat', '_predict_by_feat_single', 'regress_by_class'
ROI_PREDICTION = 'predict', 'predict_bbox', 'predict_mask', '_bbox_forward', '_mask_forward'
MASK_PREDICTION = 'predict_by_feat', '_predict_by_feat_single'
# The NMS options that a config may have; split_thr changes no result.
NMS_OPTIONS = {'type', 'iou_threshold', 'split_thr', 'class_agnostic', 'offset'}


class Unsupported(ExportError):
    """A detector with a part that no graph can compute; the message names the part."""


def check_two_stage(detector: nn.Module) -> None:
    """Raises unless :mod:`slab_det.deployment.detection` computes what ``detector.predict`` computes.

    Raises:
        Unsupported: If a part computes something else.
    """
    predicts = isinstance(detector, TwoStageDetector) and type(detector).predict is TwoStageDetector.predict
    require('a detector that predicts as TwoStageDetector does', predicts)
    rpn_head = find_part(detector, 'rpn_head', RPNHead, DENSE_PREDICTION)
    roi_head = find_part(detector, 'roi_head', StandardRoIHead, ROI_PREDICTION)
    bbox_head = find_part(roi_head, 'bbox_head', BBoxHead, BOX_PREDICTION)
    find_part(rpn_head, 'prior_generator', AnchorGenerator)
    require('an rpn_head with sigmoid scores', rpn_head.use_sigmoid_cls)
    require('a positive max_per_img in test_cfg.rpn', rpn_head.test_cfg.max_per_img > 0)
    require('a roi_head without shared_head', not roi_head.with_shared_head)
    require('a bbox_head with softmax and box regression', not bbox_head.custom_cls_channels and bbox_head.with_reg)
    for name, head, cfg in (('rpn_head', rpn_head, rpn_head.test_cfg), ('bbox_head', bbox_head, roi_head.test_cfg)):
        nms = cfg.get('nms') or {}
        plain = type_name(nms.get('type', 'nms')) == 'nms' and not nms.get('class_agnostic') and not nms.get('offset')
        known = {'iou_threshold'} <= {*nms} <= NMS_OPTIONS
        require(f'plain NMS per class in the test_cfg of the {name}', plain and known)
        coder = find_part(head, 'bbox_coder', DeltaXYWHBBoxCoder, ('decode',))
        require('bbox_coders without add_ctr_clamp', not coder.add_ctr_clamp)
    if detector.with_mask:
        find_part(roi_head, 'mask_head', FCNMaskHead, MASK_PREDICTION)
        require('a mask_thr_binary of at least 0 in test_cfg.rcnn', roi_head.test_cfg.mask_thr_binary >= 0)
    for name in ('bbox_roi_extractor', 'mask_roi_extractor')[: 1 + detector.with_mask]:
        layers = find_part(roi_head, name, SingleRoIExtractor).roi_layers
        require("roi_layers of pool_mode='avg'", all(getattr(layer, 'pool_mode', '') == 'avg' for layer in layers))


def find_part(owner: nn.Module, name: str, base: type, methods: Iterable[str] = ()) -> Any:
    """Returns a part of ``owner``; raises :class:`Unsupported` if it is no ``base`` or overrides one of ``methods``."""
    part = getattr(owner, name, None)
    same = (getattr(type(part), method) is getattr(base, method) for method in methods)
    if not isinstance(part, base) or not all(same):
        raise Unsupported(f'a graph needs {base.__name__} as {name}, not {type(part).__name__}')
    return part


def require(what: str, given: bool) -> None:
    """Raises :class:`Unsupported` unless the detector has what a graph needs."""
    if not given:
        raise Unsupported(f'a graph of detections needs {what}')
