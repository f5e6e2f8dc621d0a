"""Computes a whole detector on tensors of fixed shapes, so that one CUDA graph can hold it."""

from __future__ import annotations

import torch
from mmdet.models.detectors import TwoStageDetector
from torch import Tensor

from slab_det.deployment.detection import EMPTY, Boxes, detect_regions, propose
from slab_det.deployment.gpu.box_kernels import anchors, can_pool
from slab_det.deployment.gpu.layers import RPN, BoxHead, MaskHead
from slab_det.deployment.supported import check_two_stage, require


class StaticDetector:
    """Runs a Faster or Mask R-CNN on tensors whose shapes do not depend on the number of objects.

    Args:
        detector: The detector, whose modules run.
        boxes: Box operators that return tensors of fixed shapes.
        fused: Whether the heads run in their fused forms, with fewer kernels.

    Raises:
        Unsupported: If a part of the detector computes something that this class does not.
    """

    def __init__(self, detector: TwoStageDetector, boxes: Boxes, fused: bool = False) -> None:
        check_two_stage(detector)
        rpn_head, roi_head = detector.rpn_head, detector.roi_head
        self.detector, self.boxes, self.rpn = detector, boxes, RPN(rpn_head, fused)
        self.box_head = BoxHead(roi_head.bbox_head, fused)
        self.mask_head = MaskHead(roi_head.mask_head, fused) if detector.with_mask else None
        extractors = [roi_head.bbox_roi_extractor, *([roi_head.mask_roi_extractor] if detector.with_mask else [])]
        # Kernels of NMS count pairs of anchors in 32 bits.
        require('a positive nms_pre in test_cfg.rpn', rpn_head.test_cfg.get('nms_pre', -1) > 0)
        require('square RoIAlign with sampling_ratio=0 on up to four levels', all(map(can_pool, extractors)))

    def __call__(self, image: Tensor, frame: Tensor) -> tuple[Tensor, ...]:
        """Detects the objects of an image (1, 3, H, W); the first ``count`` of the n returned rows are objects.

        Args:
            image: Normalised and padded.
            frame: Result of :func:`measure_frame`, (3, 4).

        Returns:
            Integers (count, exact); exact is 0 if ``predict`` of the detector may find other objects. Then, best first:
            corners in the original image (n, 4), scores (n,), labels (n,) and, with a mask head, mask probabilities
            (n, 28, 28).
        """
        boxes, rpn_head, roi_head = self.boxes, self.detector.rpn_head, self.detector.roi_head
        limits, scale, rescale = frame
        features = self.detector.extract_feat(image)
        priors = anchors(rpn_head.prior_generator, tuple(x.shape[-2:] for x in features), image.device)
        corners, scores = propose(boxes, rpn_head, *self.rpn(features), priors, limits)
        # mmdet ranks a NaN score first; here a place whose score is NaN counts as empty.
        is_number = scores[0] == scores[0]
        regions, _ = boxes.pool(roi_head.bbox_roi_extractor, features, corners, scores)
        outputs = *self.box_head(regions), (corners, scores), limits
        # With masks, mmdet suppresses boxes before it rescales them to the original image.
        rescale = None if self.mask_head else rescale
        cfg = roi_head.test_cfg
        corners, scores, labels, exact = detect_regions(
            boxes, roi_head.bbox_head, cfg, *outputs, rescale, cfg.score_thr
        )
        exact = exact & is_number
        masks = ()
        if self.mask_head:
            regions, _ = boxes.pool(roi_head.mask_roi_extractor, features, corners, scores)
            corners, masks = corners / scale, (self.mask_head(regions, labels).sigmoid(),)
        return torch.stack([(scores > EMPTY).sum(), exact.long()]), corners, scores, labels, *masks


def measure_frame(metainfo: dict) -> Tensor:
    """Returns rows (x, y, x, y): unpadded size of an image, its scale, and the inverse scale, rounded as in mmdet."""
    (height, width), (x, y) = metainfo['img_shape'][:2], metainfo['scale_factor'][:2]
    return torch.tensor([[width, height] * 2, [x, y] * 2, [1 / x, 1 / y] * 2], dtype=torch.float32)
