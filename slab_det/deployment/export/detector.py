"""Mask and Faster R-CNN as one graph: raw pixels in, detections out."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
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

from slab_det.runtime.config import type_name
from slab_det.runtime.errors import ExportError

# mmdet's delta2bbox: no side changes by more than this.
MAX_LOG_RATIO = abs(math.log(16 / 1000))
# The parts that have an export form.
DENSE_PARTS = {'data_preprocessor': DetDataPreprocessor, 'rpn_head': RPNHead}
BOX_PARTS = {
    'rpn_head.prior_generator': AnchorGenerator,
    'rpn_head.bbox_coder': DeltaXYWHBBoxCoder,
    'roi_head': StandardRoIHead,
    'roi_head.bbox_roi_extractor': SingleRoIExtractor,
    'roi_head.bbox_head': ConvFCBBoxHead,
    'roi_head.bbox_head.bbox_coder': DeltaXYWHBBoxCoder,
}
MASK_PARTS = {'roi_head.mask_roi_extractor': SingleRoIExtractor, 'roi_head.mask_head': FCNMaskHead}
# What the first stage computes on each level.
KINDS = ('feature', 'objectness', 'delta')
# DetectorGraph does what StandardRoIHead does in these; MaskScoringRoIHead, for one, changes the scores in the third.
ROI_METHODS = ('predict', 'predict_bbox', 'predict_mask', '_bbox_forward', '_mask_forward')


def _check_parts(detector: nn.Module, parts: dict[str, type]) -> None:
    for name, kind in parts.items():
        try:
            part = attrgetter(name)(detector)
        except AttributeError:
            part = None
        if not isinstance(part, kind):
            raise ExportError(f'{name} is a {type(part).__name__}: only {kind.__name__} has an export form')


def _check_options(detector: TwoStageDetector) -> None:
    roi_head, box_head, rpn_head = detector.roi_head, detector.roi_head.bbox_head, detector.rpn_head
    per_class = not (box_head.reg_class_agnostic or detector.with_mask and roi_head.mask_head.class_agnostic)
    layers = [layer for module in roi_head.children() for layer in getattr(module, 'roi_layers', ())]
    kind = type(roi_head)
    needed = {
        'an rpn_head with sigmoid scores': rpn_head.use_sigmoid_cls,
        'a roi_head that predicts as StandardRoIHead does': all(
            getattr(kind, name) is getattr(StandardRoIHead, name) for name in ROI_METHODS
        ),
        'a roi_head without shared_head': not roi_head.with_shared_head,
        'a bbox_head with softmax scores and boxes': not box_head.custom_cls_channels and box_head.with_reg,
        'a box and a mask for each class': per_class,
        "roi_layers of pool_mode='avg'": all(getattr(layer, 'pool_mode', '') == 'avg' for layer in layers),
        'a positive max_per_img in test_cfg.rpn': rpn_head.test_cfg.max_per_img > 0,
        'bbox_coders without add_ctr_clamp': not any(head.bbox_coder.add_ctr_clamp for head in (rpn_head, box_head)),
    }
    for name, nms in (('rpn', rpn_head.test_cfg.nms), ('rcnn', roi_head.test_cfg.nms)):
        is_plain = (
            type_name(nms.get('type', 'nms')) == 'nms' and not nms.get('class_agnostic') and not nms.get('offset')
        )
        needed[f'plain NMS per class in test_cfg.{name}.nms'] = is_plain
    for what, given in needed.items():
        if not given:
            raise ExportError(f'only detectors with {what} have an export form')


class DenseGraph(nn.Module):
    """Preprocessing, backbone, neck and RPN head of a detector whose backbone is size-free.

    Shape:
        (1, 3, H, W), 0 to 255 -> the feature maps, then the objectness logits, then the box deltas of each level.
    """

    def __init__(self, detector: TwoStageDetector) -> None:
        super().__init__()
        if not isinstance(detector, TwoStageDetector):
            raise ExportError(f'only two-stage detectors have an export form, {type(detector).__name__} is none')
        _check_parts(detector, DENSE_PARTS)
        self.detector = detector

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        values = self.run(image)
        return tuple(values[name] for name in self.output_names())

    def run(self, image: Tensor, given: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The outputs by name, and the values in between that the parity check compares.

        Args:
            image: (1, 3, H, W), 0 to 255.
            given: Values that the following steps read in place of those that the steps before have computed, and
                perhaps another ``score_thr``.
        """
        features = self.detector.extract_feat(self._preprocess(image))
        maps = zip(KINDS, (features, *self.detector.rpn_head(features)), strict=True)
        return {f'{kind}{i}': level for kind, levels in maps for i, level in enumerate(levels)}

    def _preprocess(self, image: Tensor) -> Tensor:
        """The data_preprocessor as in testing: each side becomes the next multiple of its divisor."""
        preprocessor = self.detector.data_preprocessor
        if preprocessor._channel_conversion:
            image = image.flip(1)
        if preprocessor._enable_normalize:
            image = (image - preprocessor.mean) / preprocessor.std
        height, width, divisor = image.shape[2], image.shape[3], preprocessor.pad_size_divisor
        bottom, right = ((side + divisor - 1) // divisor * divisor - side for side in (height, width))
        return F.pad(image, (0, right, 0, bottom), value=float(preprocessor.pad_value))

    def output_names(self) -> list[str]:
        levels = range(self.detector.rpn_head.prior_generator.num_levels)
        return [f'{kind}{i}' for kind in KINDS for i in levels]

    def dynamic_axes(self) -> dict[str, dict[int, str]]:
        """Names of the outputs' dimensions, but for channels."""
        return {name: {0: 'batch', 2: f'height{name[-1]}', 3: f'width{name[-1]}'} for name in self.output_names()}


class BackboneGraph(DenseGraph):
    """Preprocessing and backbone alone.

    Shape:
        (1, 3, H, W), 0 to 255 -> the feature map of each stage that the backbone puts out.
    """

    def run(self, image: Tensor, given: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """See :meth:`DenseGraph.run`."""
        return dict(zip(self.output_names(), self.detector.backbone(self._preprocess(image)), strict=True))

    def output_names(self) -> list[str]:
        return [f'feature{i}' for i in range(len(self.detector.backbone.out_indices))]


class DetectorGraph(DenseGraph):
    """The whole detector but for the pasting of masks; boxes are in pixels of the input image, sorted by score.

    Attributes:
        score_thr: Detections have a larger score.

    Shape:
        (1, 3, H, W) -> boxes (n, 4), scores (n,), labels (n,) and, with a mask head, mask logits (n, 28, 28).
    """

    def __init__(self, detector: TwoStageDetector) -> None:
        super().__init__(detector)
        _check_parts(detector, {**BOX_PARTS, **(MASK_PARTS if detector.with_mask else {})})
        _check_options(detector)
        self.register_buffer('score_thr', torch.tensor(float(detector.roi_head.test_cfg.score_thr)))

    def run(self, image: Tensor, given: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """See :meth:`DenseGraph.run`."""
        # Not shape[2:]: as a tensor the sizes reach the arithmetic of boxes.
        limits = torch._shape_as_tensor(image)[[3, 2, 3, 2]].to(image.dtype)
        roi_head = self.detector.roi_head
        values = super().run(image)
        known = ChainMap(given or {}, values, dict(score_thr=self.score_thr))
        features, logits, deltas = ([known[name] for name in values if name.startswith(kind)] for kind in KINDS)
        values['proposals'] = propose(self.detector.rpn_head, logits, deltas, limits)
        regions, order = pool_regions(roi_head.bbox_roi_extractor, features, known['proposals'])
        values['class_logits'], values['box_deltas'] = roi_head.bbox_head(regions)
        outputs = known['class_logits'], known['box_deltas']
        found = self._select(*outputs, known['proposals'][order], limits, known['score_thr'])
        values.update(zip(('boxes', 'scores', 'labels'), found, strict=True))
        if self.detector.with_mask:
            regions, order = pool_regions(roi_head.mask_roi_extractor, features, known['boxes'])
            values['class_masks'] = roi_head.mask_head(regions)
            row = torch.arange(order.shape[0])
            # Each detection's own class.
            logits = known['class_masks'][row, known['labels'][order]]
            values['mask_logits'] = logits[torch.zeros_like(order).scatter(0, order, row)]
        return values

    def output_names(self) -> list[str]:
        return ['boxes', 'scores', 'labels'] + ['mask_logits'] * self.detector.with_mask

    def dynamic_axes(self) -> dict[str, dict[int, str]]:
        """Names of the outputs' dimensions that depend on the image."""
        return {name: {0: 'detections'} for name in self.output_names()}

    def _select(
        self, logits: Tensor, deltas: Tensor, proposals: Tensor, limits: Tensor, score_thr: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        roi_head = self.detector.roi_head
        scores = logits.softmax(-1)[:, :-1]
        found = torch.nonzero(scores > score_thr)
        box, label = found[:, 0], found[:, 1]
        # Only what passed the threshold is decoded.
        deltas = deltas.reshape(-1, roi_head.bbox_head.num_classes, 4)[box, label]
        boxes = decode_boxes(roi_head.bbox_head.bbox_coder, proposals[box], deltas, limits)
        scores = scores[box, label]
        kept = suppress(boxes, scores, label, roi_head.test_cfg)
        return boxes[kept], scores[kept], label[kept]


def propose(head: RPNHead, logits: tuple[Tensor, ...], deltas: tuple[Tensor, ...], limits: Tensor) -> Tensor:
    """Corners (P, 4) of the best anchors of each level, decoded, suppressed (Ren et al., NeurIPS 2015)."""
    parts = [_best_anchors(head, i, *maps) for i, maps in enumerate(zip(logits, deltas, strict=True))]
    scores, anchors, deltas = (torch.cat(column) for column in zip(*parts, strict=True))
    levels = torch.cat([torch.zeros_like(part[0]) + i for i, part in enumerate(parts)])
    boxes = decode_boxes(head.bbox_coder, anchors, deltas, limits)
    smallest = head.test_cfg.get('min_bbox_size', -1)
    if smallest >= 0:
        kept = _nonzero((boxes[:, 2:] - boxes[:, :2]).amin(1) > smallest)
        boxes, scores, levels = boxes[kept], scores[kept], levels[kept]
    return boxes[suppress(boxes, scores, levels, head.test_cfg)]


def _best_anchors(head: RPNHead, level: int, logits: Tensor, deltas: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, anchors and deltas of the ``nms_pre`` best anchors of a level."""
    generator = head.prior_generator
    base, (stride_x, stride_y) = generator.base_anchors[level].to(logits), generator.strides[level]
    # In the order of anchors: row, column, then shape.
    scores = logits.permute(0, 2, 3, 1).reshape(-1).sigmoid()
    deltas = deltas.permute(0, 2, 3, 1).reshape(-1, 4)
    index = torch.arange(scores.shape[0])
    nms_pre = head.test_cfg.get('nms_pre', -1)
    if nms_pre > 0:
        # min() on a traced size would be a constant.
        count = torch.minimum(torch._shape_as_tensor(scores)[0], torch.tensor(nms_pre))
        scores, index = scores.topk(count)
        deltas = deltas[index]
    cell, shape = torch.div(index, base.shape[0], rounding_mode='floor'), index % base.shape[0]
    width = logits.shape[3]
    row = torch.div(cell, width, rounding_mode='floor')
    corner = torch.stack([(cell - row * width) * stride_x, row * stride_y], 1)
    return scores, base[shape] + corner.to(base.dtype).repeat(1, 2), deltas


def pool_regions(extractor: SingleRoIExtractor, features: tuple[Tensor, ...], boxes: Tensor) -> tuple[Tensor, Tensor]:
    """RoIAlign of every box on its level of the pyramid (FPN, Lin et al., CVPR 2017, eq. 1).

    Returns:
        Regions (n, C, h, w) level by level, and the box that each belongs to, (n,).
    """
    layers = extractor.roi_layers
    scale = ((boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])).sqrt()
    # log(0) of an empty box is -inf, which no integer holds: the epsilon comes first.
    level = torch.log2(scale / extractor.finest_scale + 1e-6).floor()
    level = level.clamp(0, len(layers) - 1).to(torch.int64)
    members = [_nonzero(level == i) for i in range(len(layers))]
    regions = [
        torchvision.ops.roi_align(
            feature,
            torch.cat([torch.zeros_like(boxes[index, :1]), boxes[index]], 1),
            layer.output_size,
            layer.spatial_scale,
            layer.sampling_ratio,
            layer.aligned,
        )
        for feature, index, layer in zip(features, members, layers, strict=False)
    ]
    return torch.cat(regions), torch.cat(members)


def decode_boxes(coder: DeltaXYWHBBoxCoder, boxes: Tensor, deltas: Tensor, limits: Tensor) -> Tensor:
    """``center + delta * size`` and ``size * exp(delta)`` (R-CNN, Girshick et al., CVPR 2014, appendix C), clipped.

    Args:
        coder: Gives means and standard deviations of the deltas.
        boxes: Corners, (N, 4).
        deltas: (N, 4).
        limits: The image's (width, height, width, height).

    Returns:
        Corners, (N, 4).
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


def suppress(boxes: Tensor, scores: Tensor, groups: Tensor, cfg: Any) -> Tensor:
    """Indices of the best boxes that no better one of their group overlaps, by descending score.

    Args:
        boxes: Corners, (N, 4), none negative.
        scores: (N,).
        groups: The class or the level of each box, (N,).
        cfg: The detector's test_cfg: the NMS, and how many boxes stay, -1 for all.
    """
    # mmcv's way, rounding included: each group in a place of its own. The zero keeps max() of no boxes defined.
    stride = torch.cat([boxes.reshape(-1), boxes.new_zeros(1)]).max() + 1
    boxes = boxes + (groups.to(boxes.dtype) * stride)[:, None]
    limit = cfg.max_per_img if cfg.max_per_img > 0 else torch.iinfo(torch.int32).max
    return _Suppression.apply(boxes, scores, cfg.nms.iou_threshold, limit)


def _nonzero(mask: Tensor) -> Tensor:
    return torch.nonzero(mask)[:, 0]
