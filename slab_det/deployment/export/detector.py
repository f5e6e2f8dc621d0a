"""Mask and Faster R-CNN as one graph: raw pixels in, detections out."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from mmcv.ops import RoIAlign
from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.models.dense_heads import RPNHead
from mmdet.models.detectors import TwoStageDetector
from mmdet.models.roi_heads import StandardRoIHead
from mmdet.models.roi_heads.bbox_heads import ConvFCBBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from mmdet.models.task_modules.coders import DeltaXYWHBBoxCoder
from mmdet.models.task_modules.prior_generators import AnchorGenerator
from torch import Tensor, nn

from slab_det.runtime.errors import ExportError

# mmdet's delta2bbox: no side changes by more than this.
MAX_LOG_RATIO = abs(math.log(16 / 1000))


class Preprocessing(nn.Module):
    """The data_preprocessor of a detector as in testing: channel order, mean, deviation, padding.

    Shape:
        (1, 3, H, W), 0 to 255 -> (1, 3, H', W'), each side the next multiple of the divisor.
    """

    def __init__(self, preprocessor: DetDataPreprocessor) -> None:
        super().__init__()
        _check_types(('data_preprocessor', preprocessor, DetDataPreprocessor))
        self.divisor = preprocessor.pad_size_divisor
        self.pad_value = float(preprocessor.pad_value)
        self.swaps_channels = preprocessor._channel_conversion
        normalizes = preprocessor._enable_normalize
        self.register_buffer('mean', preprocessor.mean if normalizes else torch.zeros(3, 1, 1))
        self.register_buffer('std', preprocessor.std if normalizes else torch.ones(3, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        if self.swaps_channels:
            image = image.flip(1)
        image = (image - self.mean) / self.std
        height, width = image.shape[2], image.shape[3]
        bottom, right = ((side + self.divisor - 1) // self.divisor * self.divisor - side for side in (height, width))
        return F.pad(image, (0, right, 0, bottom), value=self.pad_value)


class DenseGraph(nn.Module):
    """Preprocessing, backbone, neck and RPN head of a detector whose backbone is size-free.

    Shape:
        (1, 3, H, W) -> the feature maps, then the objectness logits, then the box deltas of each level.
    """

    def __init__(self, detector: TwoStageDetector) -> None:
        super().__init__()
        _check_types(('detector', detector, TwoStageDetector), ('rpn_head', detector.rpn_head, RPNHead))
        self.preprocessing = Preprocessing(detector.data_preprocessor)
        self.detector = detector

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        features = self.detector.extract_feat(self.preprocessing(image))
        logits, deltas = self.detector.rpn_head(features)
        return (*features, *logits, *deltas)

    def output_names(self) -> list[str]:
        levels = range(self.detector.neck.num_outs)
        return [f'{kind}{i}' for kind in ('feature', 'objectness', 'delta') for i in levels]


class DetectorGraph(nn.Module):
    """The whole detector but for the pasting of masks; boxes are in pixels of the input image, sorted by score.

    Shape:
        (1, 3, H, W) -> boxes (n, 4), scores (n,), labels (n,) and, with a mask head, mask logits (n, 28, 28).
    """

    def __init__(self, detector: TwoStageDetector) -> None:
        super().__init__()
        self.dense = DenseGraph(detector)
        self.proposals = Proposals(detector.rpn_head)
        self.boxes = BoxHead(detector.roi_head)
        self.masks = MaskHead(detector.roi_head) if detector.with_mask else None

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        # Not shape[2:]: as a tensor the sizes reach the arithmetic of boxes.
        limits = torch._shape_as_tensor(image)[[3, 2, 3, 2]].to(image.dtype)
        outputs = self.dense(image)
        levels = len(outputs) // 3
        features, logits, deltas = (outputs[i * levels : (i + 1) * levels] for i in range(3))
        boxes, scores, labels = self.boxes(features, self.proposals(logits, deltas, limits), limits)
        masks = () if self.masks is None else (self.masks(features, boxes, labels),)
        return boxes, scores, labels, *masks

    def output_names(self) -> list[str]:
        return ['boxes', 'scores', 'labels'] + (['mask_logits'] if self.masks is not None else [])


class Proposals(nn.Module):
    """The RPN's boxes: the best anchors of each level, decoded, suppressed (Faster R-CNN, Ren et al., NeurIPS 2015)."""

    def __init__(self, head: RPNHead) -> None:
        super().__init__()
        generator = head.prior_generator
        _check_types(
            ('anchor_generator', generator, AnchorGenerator), ('bbox_coder', head.bbox_coder, DeltaXYWHBBoxCoder)
        )
        if not head.use_sigmoid_cls:
            raise ExportError('rpn_head: its scores are no sigmoid')
        self.strides = [tuple(stride) for stride in generator.strides]
        for i, anchors in enumerate(generator.base_anchors):
            self.register_buffer(f'anchors{i}', anchors)
        self.coder = head.bbox_coder
        self.cfg = head.test_cfg
        self.iou_threshold = _iou_threshold(self.cfg.nms, 'rpn')

    def forward(self, logits: tuple[Tensor, ...], deltas: tuple[Tensor, ...], limits: Tensor) -> Tensor:
        """Corners of the proposals, (P, 4)."""
        parts = [self._best(i, *maps) for i, maps in enumerate(zip(logits, deltas, strict=True))]
        scores, anchors, deltas = (torch.cat(column) for column in zip(*parts, strict=True))
        levels = torch.cat([torch.zeros_like(part[0]) + i for i, part in enumerate(parts)])
        boxes = decode_boxes(self.coder, anchors, deltas, limits)
        smallest = self.cfg.get('min_bbox_size', -1)
        if smallest >= 0:
            sides = boxes[:, 2:] - boxes[:, :2]
            kept = _nonzero(sides.amin(1) > smallest)
            boxes, scores, levels = boxes[kept], scores[kept], levels[kept]
        return boxes[suppress(boxes, scores, levels, self.iou_threshold, self.cfg.max_per_img)]

    def _best(self, level: int, logits: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores, anchors and deltas of the ``nms_pre`` best anchors of a level."""
        base = getattr(self, f'anchors{level}').to(logits.dtype)
        # In the order of anchors: row, column, then shape.
        scores = logits.permute(0, 2, 3, 1).reshape(-1).sigmoid()
        deltas = deltas.permute(0, 2, 3, 1).reshape(-1, 4)
        index = torch.arange(scores.shape[0])
        nms_pre = self.cfg.get('nms_pre', -1)
        if nms_pre > 0:
            # min() on a traced size would be a constant.
            count = torch.minimum(torch._shape_as_tensor(scores)[0], torch.tensor(nms_pre))
            scores, index = scores.topk(count)
            deltas = deltas[index]
        cell, shape = torch.div(index, base.shape[0], rounding_mode='floor'), index % base.shape[0]
        width = logits.shape[3]
        row = torch.div(cell, width, rounding_mode='floor')
        corner = torch.stack([(cell - row * width) * self.strides[level][0], row * self.strides[level][1]], 1)
        return scores, base[shape] + corner.to(base.dtype).repeat(1, 2), deltas


class BoxHead(nn.Module):
    """Classes and boxes of proposals."""

    def __init__(self, roi_head: StandardRoIHead) -> None:
        super().__init__()
        head = roi_head.bbox_head
        _check_types(
            ('roi_head', roi_head, StandardRoIHead),
            ('bbox_head', head, ConvFCBBoxHead),
            ('bbox_coder', head.bbox_coder, DeltaXYWHBBoxCoder),
        )
        if roi_head.with_shared_head or head.custom_cls_channels or not (head.with_cls and head.with_reg):
            raise ExportError('roi_head: shared heads and bbox heads without softmax or boxes have no export form')
        self.regions = Regions(roi_head.bbox_roi_extractor)
        self.head = head
        self.cfg = roi_head.test_cfg
        self.iou_threshold = _iou_threshold(self.cfg.nms, 'rcnn')

    def forward(self, features: tuple[Tensor, ...], proposals: Tensor, limits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Corners, scores and labels of the detections."""
        regions, order = self.regions(features, proposals)
        logits, deltas = self.head(regions)
        proposals = proposals[order]
        scores = logits.softmax(-1)[:, :-1]
        found = torch.nonzero(scores > self.cfg.score_thr)
        box, label = found[:, 0], found[:, 1]
        deltas = deltas.reshape(-1, 1 if self.head.reg_class_agnostic else self.head.num_classes, 4)
        # Only what passed the threshold is decoded.
        deltas = deltas[box, torch.zeros_like(label) if self.head.reg_class_agnostic else label]
        boxes, scores = decode_boxes(self.head.bbox_coder, proposals[box], deltas, limits), scores[box, label]
        kept = suppress(boxes, scores, label, self.iou_threshold, self.cfg.max_per_img)
        return boxes[kept], scores[kept], label[kept]


class MaskHead(nn.Module):
    """Mask logits of detections."""

    def __init__(self, roi_head: StandardRoIHead) -> None:
        super().__init__()
        _check_types(('mask_head', roi_head.mask_head, FCNMaskHead))
        self.regions = Regions(roi_head.mask_roi_extractor)
        self.head = roi_head.mask_head

    def forward(self, features: tuple[Tensor, ...], boxes: Tensor, labels: Tensor) -> Tensor:
        """The logits of each detection's own class, (n, 28, 28)."""
        regions, order = self.regions(features, boxes)
        logits = self.head(regions)
        row = torch.arange(order.shape[0])
        logits = logits[row, torch.zeros_like(order) if self.head.class_agnostic else labels[order]]
        return logits[torch.zeros_like(order).scatter(0, order, row)]


class Regions(nn.Module):
    """RoIAlign of every box on its level of the pyramid."""

    def __init__(self, extractor: SingleRoIExtractor) -> None:
        super().__init__()
        _check_types(
            ('roi_extractor', extractor, SingleRoIExtractor),
            *(('roi_layer', layer, RoIAlign) for layer in extractor.roi_layers),
        )
        if any(layer.pool_mode != 'avg' for layer in extractor.roi_layers):
            raise ExportError("roi_layer: pool_mode='max' has no export form")
        self.layers = extractor.roi_layers
        self.finest_scale = extractor.finest_scale

    def forward(self, features: tuple[Tensor, ...], boxes: Tensor) -> tuple[Tensor, Tensor]:
        """Regions (n, C, h, w) level by level, and the box that each belongs to, (n,)."""
        level = pyramid_level(boxes, self.finest_scale, len(self.layers))
        members = [_nonzero(level == i) for i in range(len(self.layers))]
        regions = [
            torchvision.ops.roi_align(
                feature,
                torch.cat([torch.zeros_like(boxes[index, :1]), boxes[index]], 1),
                layer.output_size,
                layer.spatial_scale,
                layer.sampling_ratio,
                layer.aligned,
            )
            for feature, index, layer in zip(features, members, self.layers, strict=False)
        ]
        return torch.cat(regions), torch.cat(members)


def decode_boxes(coder: DeltaXYWHBBoxCoder, boxes: Tensor, deltas: Tensor, limits: Tensor) -> Tensor:
    """``center + delta * size`` and ``size * exp(delta)`` (R-CNN, Girshick et al., CVPR 2014, appendix C), clipped.

    Args:
        coder: Gives means and standard deviations of the deltas.
        boxes: Corners, (N, 1, 4) or (N, 4).
        deltas: (N, K, 4) or (N, 4).
        limits: The image's (width, height, width, height).

    Returns:
        Corners, in the shape of ``deltas``.
    """
    deltas = deltas * deltas.new_tensor(coder.stds) + deltas.new_tensor(coder.means)
    low, high = boxes[..., :2], boxes[..., 2:]
    size = high - low
    center = (low + high) * 0.5 + size * deltas[..., :2]
    half = size * deltas[..., 2:].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * 0.5
    decoded = torch.cat([center - half, center + half], -1)
    return torch.minimum(decoded.clamp(min=0), limits) if coder.clip_border else decoded


class _Suppression(torch.autograd.Function):
    """Greedy NMS that stops after ``limit`` boxes; ONNX's NonMaxSuppression on one class."""

    @staticmethod
    def forward(ctx: Any, boxes: Tensor, scores: Tensor, iou_threshold: float, limit: int) -> Tensor:
        return torchvision.ops.nms(boxes, scores, iou_threshold)[:limit]

    @staticmethod
    def symbolic(g: Any, boxes: Any, scores: Any, iou_threshold: float, limit: int) -> Any:
        def constant(*values: float | int) -> Any:
            return g.op('Constant', value_t=torch.tensor(values))

        boxes, scores = g.op('Unsqueeze', boxes, constant(0)), g.op('Unsqueeze', scores, constant(0, 1))
        selected = g.op('NonMaxSuppression', boxes, scores, constant(limit), constant(iou_threshold))
        # Rows of (image, class, box).
        return g.op('Gather', selected, g.op('Constant', value_t=torch.tensor(2)), axis_i=1)


def suppress(boxes: Tensor, scores: Tensor, groups: Tensor, iou_threshold: float, limit: int) -> Tensor:
    """Indices of the best boxes that no better one of their group overlaps, by descending score.

    Args:
        boxes: Corners, (N, 4), none negative.
        scores: (N,).
        groups: The class or the level of each box, (N,).
        iou_threshold: A box goes if it overlaps a better one by more.
        limit: At most so many stay.
    """
    # mmcv's way, rounding included: each group in a place of its own. The zero keeps max() of no boxes defined.
    stride = torch.cat([boxes.reshape(-1), boxes.new_zeros(1)]).max() + 1
    return _Suppression.apply(boxes + (groups.to(boxes.dtype) * stride)[:, None], scores, iou_threshold, limit)


def pyramid_level(boxes: Tensor, finest_scale: int, num_levels: int) -> Tensor:
    """Level 0 below twice ``finest_scale``, one more for each doubling (FPN, Lin et al., CVPR 2017, eq. 1)."""
    scale = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
    # log(0) of an empty box is -inf, which no integer holds: the epsilon comes first.
    level = torch.log2(scale / finest_scale + 1e-6).floor()
    return level.clamp(0, num_levels - 1).to(torch.int64)


def _nonzero(mask: Tensor) -> Tensor:
    return torch.nonzero(mask)[:, 0]


def _iou_threshold(nms: dict, where: str) -> float:
    if nms.get('type', 'nms') != 'nms' or nms.get('class_agnostic', False) or nms.get('offset', 0):
        raise ExportError(f'test_cfg.{where}.nms={dict(nms)} has no export form: only plain NMS per class has')
    return nms['iou_threshold']


def _check_types(*parts: tuple[str, object, type]) -> None:
    for name, part, expected in parts:
        # Exact where a subclass may compute something else; detectors and bbox heads only combine.
        if not isinstance(part, expected):
            raise ExportError(f'{name} is a {type(part).__name__}: only {expected.__name__} has an export form')
