"""Runs the heads of a detector on the maps of its neck, teacher and student at the same regions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from mmdet.models.dense_heads import RetinaHead, RPNHead
from mmdet.models.detectors import SingleStageDetector, TwoStageDetector
from mmdet.models.roi_heads import StandardRoIHead
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import bbox2roi
from torch import Tensor, nn


class Regions(NamedTuple):
    """The regions of a batch at which a teacher's heads run, each (n, 5): the index of the image, x1, y1, x2, y2.

    Attributes:
        proposals: What the RPN finds, for the box head.
        detections: What the box head finds, for the mask head.
    """

    proposals: Tensor
    detections: Tensor


def has_known_heads(model: nn.Module) -> bool:
    """Whether :func:`run_heads` runs the heads of a detector: RetinaNet, or Faster or Mask R-CNN."""
    if isinstance(model, SingleStageDetector):
        return type(model.bbox_head) is RetinaHead
    return isinstance(model, TwoStageDetector) and (type(model.rpn_head), type(model.roi_head)) == (
        RPNHead,
        StandardRoIHead,
    )


@torch.no_grad()
def find_regions(model: nn.Module, images: Tensor, samples: Sequence[DetDataSample]) -> Regions | None:
    """Finds the regions of a batch (B, 3, H, W), in pixels of ``images``; None if no head of the detector reads any."""
    if not isinstance(model, TwoStageDetector):
        return None
    maps, metas = model.extract_feat(images), [sample.metainfo for sample in samples]
    proposals = model.rpn_head.predict(maps, samples, rescale=False)
    found = model.roi_head.predict_bbox(maps, metas, proposals, model.roi_head.test_cfg, rescale=False)
    return Regions(*(bbox2roi([part.bboxes for part in parts]) for parts in (proposals, found)))


def run_heads(model: nn.Module, maps: Sequence[Tensor], regions: Regions | None) -> None:
    """Runs the heads on the maps of the neck; regions of images that are not in ``maps`` are left out."""
    if regions is None:
        model.bbox_head(maps)
        return
    model.rpn_head(maps)
    proposals, detections = (part[part[:, 0] < len(maps[0])] for part in regions)
    model.roi_head._bbox_forward(maps, proposals)
    if model.with_mask:
        model.roi_head._mask_forward(maps, detections)
