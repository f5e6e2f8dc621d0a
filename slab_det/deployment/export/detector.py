"""The modules that export_onnx traces: a backbone, or a whole Mask or Faster R-CNN from raw pixels to detections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.models.dense_heads import RPNHead
from mmdet.models.detectors import TwoStageDetector
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from torch import Tensor, nn

from slab_det.deployment import detection
from slab_det.deployment.detection import EMPTY, Boxes, flat
from slab_det.deployment.supported import check_two_stage, find_part


class BackboneGraph(nn.Module):
    """Preprocessing and backbone of a detector, after :func:`make_size_free`.

    Shape:
        (1, 3, H, W), 0 to 255 -> the feature maps that the backbone returns.
    """

    def __init__(self, detector: TwoStageDetector) -> None:
        super().__init__()
        find_part(detector, 'data_preprocessor', DetDataPreprocessor)
        self.detector = detector

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.detector.backbone(self._preprocess(image)))

    def _preprocess(self, image: Tensor) -> Tensor:
        """Normalises and pads as ``data_preprocessor`` does at test time."""
        preprocessor = self.detector.data_preprocessor
        if preprocessor._channel_conversion:
            image = image.flip(1)
        if preprocessor._enable_normalize:
            image = (image - preprocessor.mean) / preprocessor.std
        height, width, divisor = image.shape[2], image.shape[3], preprocessor.pad_size_divisor
        bottom, right = ((side + divisor - 1) // divisor * divisor - side for side in (height, width))
        return F.pad(image, (0, right, 0, bottom), value=float(preprocessor.pad_value))

    def output_names(self) -> list[str]:
        return [f'feature{i}' for i in range(len(self.detector.backbone.out_indices))]

    def dynamic_axes(self) -> dict[str, dict[int, str]]:
        """Names of the outputs' dimensions that depend on the image."""
        return {name: {0: 'batch', 2: f'height{name[-1]}', 3: f'width{name[-1]}'} for name in self.output_names()}


class DetectorGraph(BackboneGraph):
    """The whole detector, with masks as logits; boxes are in pixels of the input image, sorted by score.

    Attributes:
        score_thr: Detections with this score or a smaller one are dropped.

    Shape:
        (1, 3, H, W) -> boxes (n, 4), scores (n,), labels (n,) and, with a mask head, mask logits (n, 28, 28).
    """

    def __init__(self, detector: TwoStageDetector) -> None:
        super().__init__(detector)
        check_two_stage(detector)
        self.register_buffer('score_thr', torch.tensor(detector.roi_head.test_cfg.score_thr, dtype=torch.float32))

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        rpn_head, roi_head, boxes = self.detector.rpn_head, self.detector.roi_head, DynamicBoxes()
        # The tracer would store the numbers in image.shape as constants.
        limits = torch._shape_as_tensor(image)[[3, 2, 3, 2]].to(image.dtype)
        features = self.detector.extract_feat(self._preprocess(image))
        logits, deltas = rpn_head(features)
        levels, deltas = [flat(x, 1).flatten() for x in logits], torch.cat([flat(x, 4) for x in deltas])
        priors = boxes.priors(rpn_head, logits)
        proposals, scores = detection.propose(boxes, rpn_head, levels, deltas, priors, limits)
        regions, order = boxes.pool(roi_head.bbox_roi_extractor, features, proposals, scores)
        outputs = roi_head.bbox_head(regions)
        proposals = proposals[order], scores[order]
        corners, scores, labels, _ = detection.detect_regions(
            boxes, roi_head.bbox_head, roi_head.test_cfg, *outputs, proposals, limits, None, self.score_thr
        )
        if not self.detector.with_mask:
            return corners, scores, labels
        regions, order = boxes.pool(roi_head.mask_roi_extractor, features, corners, scores)
        row = torch.arange(order.shape[0])
        label = torch.zeros_like(order) if roi_head.mask_head.class_agnostic else labels[order]
        logits = roi_head.mask_head(regions)[row, label]
        return corners, scores, labels, logits[torch.zeros_like(order).scatter(0, order, row)]

    def output_names(self) -> list[str]:
        return ['boxes', 'scores', 'labels'] + ['mask_logits'] * self.detector.with_mask

    def dynamic_axes(self) -> dict[str, dict[int, str]]:
        """Names of the outputs' dimensions that depend on the image."""
        return {name: {0: 'detections'} for name in self.output_names()}


class DynamicBoxes(Boxes):
    """Box operators for any number of boxes, built from operators that ONNX has."""

    def priors(self, head: RPNHead, maps: Sequence[Tensor]) -> Tensor:
        sizes = [x.shape[-2:] for x in maps]
        return torch.cat(head.prior_generator.grid_priors(sizes, maps[0].dtype, maps[0].device))

    def best(self, levels: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor, Tensor]:
        found, start = [], 0
        for i, logits in enumerate(levels):
            # The tracer would store the result of Python's min() as a constant.
            size = torch._shape_as_tensor(logits)[0]
            k = torch.minimum(size, torch.tensor(count)) if count > 0 else size
            scores, place = logits.sigmoid().topk(k)
            found.append((scores, place + start, torch.zeros_like(scores) + i))
            start = start + size
        scores, place, level = (torch.cat(column)[None] for column in zip(*found, strict=True))
        return scores, place, level

    def candidates(self, scores: Tensor, corners: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        place = _nonzero(scores > EMPTY)
        # The reshape keeps the size of a box in the file.
        corners, scores = corners[place].reshape(-1, 4), scores[place]
        return corners, scores, place, self.stride(corners, scores), None

    def suppress(
        self, corners: Tensor, scores: Tensor, groups: Tensor, stride: Tensor, iou_threshold: float, limit: int
    ) -> tuple[Tensor, Tensor]:
        moved, scores = detection.set_apart(corners, scores, groups, stride).reshape(-1, 4), scores.reshape(-1)
        limit = limit if limit > 0 else torch.iinfo(torch.int32).max
        index = _Suppression.apply(moved, scores, iou_threshold, limit)
        return scores[index], index

    def pool(
        self, extractor: SingleRoIExtractor, features: Sequence[Tensor], boxes: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`Boxes.pool`; regions are in the order of levels."""
        levels = detection.map_levels(extractor, boxes)
        members = [_nonzero(levels == i) for i in range(len(extractor.roi_layers))]
        regions = [
            torchvision.ops.roi_align(
                feature,
                torch.cat([torch.zeros_like(boxes[index, :1]), boxes[index]], 1),
                layer.output_size,
                layer.spatial_scale,
                layer.sampling_ratio,
                layer.aligned,
            )
            for feature, index, layer in zip(features, members, extractor.roi_layers, strict=False)
        ]
        return torch.cat(regions), torch.cat(members)


class _Suppression(torch.autograd.Function):
    """Greedy NMS of non-empty boxes, which keeps at most ``limit``; in ONNX, NonMaxSuppression of one class."""

    @staticmethod
    def forward(ctx: Any, boxes: Tensor, scores: Tensor, iou_threshold: float, limit: int) -> Tensor:
        place = _nonzero(scores > EMPTY)
        return place[torchvision.ops.nms(boxes[place], scores[place], iou_threshold)[:limit]]

    @staticmethod
    def symbolic(g: Any, boxes: Any, scores: Any, iou_threshold: float, limit: int) -> Any:
        def constant(*values: float | int) -> Any:
            # ONNX knows float32 and int64 here, whatever the default dtype.
            dtype = torch.float32 if isinstance(values[0], float) else torch.int64
            return g.op('Constant', value_t=torch.tensor(values, dtype=dtype))

        boxes, scores = g.op('Unsqueeze', boxes, constant(0)), g.op('Unsqueeze', scores, constant(0, 1))
        # EMPTY / 2, because runtimes differ in whether a score equal to the threshold passes.
        limits = constant(limit), constant(float(iou_threshold)), constant(EMPTY / 2)
        selected = g.op('NonMaxSuppression', boxes, scores, *limits)
        # Each row is (image, class, box).
        return g.op('Gather', selected, g.op('Constant', value_t=torch.tensor(2)), axis_i=1)


def _nonzero(mask: Tensor) -> Tensor:
    return torch.nonzero(mask)[:, 0]
