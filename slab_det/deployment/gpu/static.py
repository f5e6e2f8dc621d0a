"""A detector as a function of tensors of fixed shapes, which one CUDA graph can hold."""

from __future__ import annotations

from typing import NamedTuple

import torch
from mmdet.models.detectors import TwoStageDetector
from torch import Tensor

from slab_det.deployment import detection
from slab_det.deployment.gpu.boxes import FixedBoxes
from slab_det.deployment.gpu.layers import RPN, BoxHead, MaskHead
from slab_det.deployment.supported import check_two_stage, find_stages


class Detections(NamedTuple):
    """What a detector found in one image, best first.

    Attributes:
        boxes: Corners in the original image, (n, 4); n is ``max_per_img``.
        scores: (n,), ``EMPTY`` behind the last object.
        labels: (n,).
        exact: Whether the detector's own ``predict`` finds the same; otherwise it must be called.
        masks: Probabilities, (n, 28, 28), or None.
    """

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    exact: Tensor
    masks: Tensor | None = None


class Frame(NamedTuple):
    """The size of an image, as tensors (4,), x and y twice.

    Attributes:
        limits: Its width and height, without padding.
        scale: How much larger it is than the original image.
        rescale: One over ``scale``, as mmdet rounds it.
    """

    limits: Tensor
    scale: Tensor
    rescale: Tensor

    @classmethod
    def numbers(cls, metainfo: dict) -> list[list[float]]:
        """The values of the three tensors, from the metainfo of a data sample."""
        (height, width), (x, y) = metainfo['img_shape'][:2], metainfo['scale_factor'][:2]
        return [[width, height] * 2, [x, y] * 2, [1 / x, 1 / y] * 2]


class StaticDetector:
    """A Faster, Mask or Cascade R-CNN as a function ``(image (1, 3, H, W), Frame) -> Detections``.

    Args:
        detector: The detector, whose modules this form runs.
        fused: Whether heads compute with fewer kernels.

    Raises:
        Unsupported: If a part of the detector computes something else than this form.
    """

    def __init__(self, detector: TwoStageDetector, fused: bool = False) -> None:
        check_two_stage(detector)
        self.detector, self.boxes, self.rpn = detector, FixedBoxes(), RPN(detector.rpn_head, fused)
        self.stages = find_stages(detector.roi_head)
        self.box_heads = [BoxHead(stage.bbox_head, fused) for stage in self.stages]
        self.mask_heads = [MaskHead(stage.mask_head, fused) for stage in self.stages if detector.with_mask]

    def settings(self) -> tuple:
        """The values of the configs that results depend on."""
        return detection.settings(self.detector.rpn_head.test_cfg), detection.settings(self.detector.roi_head.test_cfg)

    def __call__(self, image: Tensor, frame: Frame) -> Detections:
        detector, boxes = self.detector, self.boxes
        features, head, cfg = detector.extract_feat(image), detector.rpn_head, detector.roi_head.test_cfg
        corners, scores = detection.propose(
            boxes, head, *self.rpn(features), boxes.priors(head, features), frame.limits
        )
        # A score that is not a number comes first in mmdet, and is no score here.
        is_number = scores[0] == scores[0]
        all_logits, last = [], self.stages[-1].bbox_head
        for stage, box_head in zip(self.stages, self.box_heads, strict=True):
            regions, _ = boxes.pool(stage.bbox_roi_extractor, features, corners, scores)
            logits, deltas = box_head(regions)
            all_logits.append(logits)
            if stage.bbox_head is not last:
                corners = detection.refine(boxes, stage.bbox_head, logits, deltas, corners, frame.limits)
        logits = all_logits[0] if len(all_logits) == 1 else sum(all_logits) / float(len(all_logits))
        # With masks, mmdet suppresses boxes before it rescales them to the original image.
        rescale = None if detector.with_mask else frame.rescale
        corners, scores, labels, exact = detection.detect_regions(
            boxes, last, cfg, logits, deltas, (corners, scores), frame.limits, rescale, cfg.score_thr
        )
        exact = exact & is_number
        if not detector.with_mask:
            return Detections(corners, scores, labels, exact)
        masks = []
        for stage, mask_head in zip(self.stages, self.mask_heads, strict=True):
            regions, _ = boxes.pool(stage.mask_roi_extractor, features, corners, scores)
            masks.append(mask_head(regions, labels).sigmoid())
        masks = masks[0] if len(masks) == 1 else torch.stack(masks).mean(0)
        return Detections(corners / frame.scale, scores, labels, exact, masks)
