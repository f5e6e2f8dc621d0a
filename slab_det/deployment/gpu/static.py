"""Computes a whole detector on tensors of fixed shapes, so that one CUDA graph can hold it."""

from __future__ import annotations

from typing import NamedTuple

from mmdet.models.detectors import TwoStageDetector
from torch import Tensor

from slab_det.deployment import detection
from slab_det.deployment.gpu.boxes import FixedBoxes
from slab_det.deployment.gpu.layers import RPN, BoxHead, MaskHead
from slab_det.deployment.supported import check_two_stage


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
    """A Faster or Mask R-CNN as a function ``(image (1, 3, H, W), Frame) -> Detections``.

    Args:
        detector: The detector, whose modules this form runs.
        fused: Whether heads compute with fewer kernels.

    Raises:
        Unsupported: If a part of the detector computes something else than this form.
    """

    def __init__(self, detector: TwoStageDetector, fused: bool = False) -> None:
        check_two_stage(detector)
        self.detector, self.boxes, self.rpn = detector, FixedBoxes(), RPN(detector.rpn_head, fused)
        self.box_head = BoxHead(detector.roi_head.bbox_head, fused)
        self.mask_head = MaskHead(detector.roi_head.mask_head, fused) if detector.with_mask else None

    def settings(self) -> tuple:
        """The values of the configs that results depend on."""
        return detection.settings(self.detector.rpn_head.test_cfg), detection.settings(self.detector.roi_head.test_cfg)

    def __call__(self, image: Tensor, frame: Frame) -> Detections:
        boxes, rpn_head, roi_head = self.boxes, self.detector.rpn_head, self.detector.roi_head
        features = self.detector.extract_feat(image)
        priors = boxes.priors(rpn_head, features)
        corners, scores = detection.propose(boxes, rpn_head, *self.rpn(features), priors, frame.limits)
        # A score that is not a number comes first in mmdet, and is no score here.
        is_number = scores[0] == scores[0]
        regions, _ = boxes.pool(roi_head.bbox_roi_extractor, features, corners, scores)
        outputs = *self.box_head(regions), (corners, scores), frame.limits
        # With masks, mmdet suppresses boxes before it rescales them to the original image.
        rescale = None if self.mask_head else frame.rescale
        cfg = roi_head.test_cfg
        corners, scores, labels, exact = detection.detect_regions(
            boxes, roi_head.bbox_head, cfg, *outputs, rescale, cfg.score_thr
        )
        exact = exact & is_number
        if self.mask_head is None:
            return Detections(corners, scores, labels, exact)
        regions, _ = boxes.pool(roi_head.mask_roi_extractor, features, corners, scores)
        return Detections(corners / frame.scale, scores, labels, exact, self.mask_head(regions, labels).sigmoid())
