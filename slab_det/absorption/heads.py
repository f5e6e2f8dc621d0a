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
    """What a teacher finds in a batch, and where fits of the heads look.

    Attributes:
        weights: Weights of the positions of the dense head, the RPN or the head of RetinaNet, (B, 1, H, W) for each
            level. One half of their sum is equal for all positions, the other half goes by the highest score of a
            class: most positions show no object, and their outputs hardly matter.
        proposals: Regions for the box head, (n, 5): the index of the image, x1, y1, x2, y2; None without a box head.
        detections: Regions for the mask head, (n, 5).
    """

    weights: list[Tensor]
    proposals: Tensor | None = None
    detections: Tensor | None = None

    def position_weights(self, head: str, level: int) -> Tensor | None:
        """The weights for a head with this name; None for a head that reads regions, which weigh the same."""
        return self.weights[level] if head in ('rpn_head', 'bbox_head') else None


def has_known_heads(model: nn.Module) -> bool:
    """Whether :func:`run_heads` runs the heads of a detector: RetinaNet, or Faster or Mask R-CNN."""
    if isinstance(model, SingleStageDetector):
        return type(model.bbox_head) is RetinaHead
    return isinstance(model, TwoStageDetector) and (type(model.rpn_head), type(model.roi_head)) == (
        RPNHead,
        StandardRoIHead,
    )


@torch.no_grad()
def find_regions(model: nn.Module, images: Tensor, samples: Sequence[DetDataSample]) -> Regions:
    """Finds the regions of a batch (B, 3, H, W), in pixels of ``images``."""
    maps, metas = model.extract_feat(images), [sample.metainfo for sample in samples]
    two_stages = isinstance(model, TwoStageDetector)
    scores = [x.sigmoid().amax(1, keepdim=True) for x in (model.rpn_head if two_stages else model.bbox_head)(maps)[0]]
    mean = sum(x.sum() for x in scores) / sum(x.numel() for x in scores)
    weights = [(x / mean + 1) / 2 for x in scores]
    if not two_stages:
        return Regions(weights)
    proposals = model.rpn_head.predict(maps, samples, rescale=False)
    found = model.roi_head.predict_bbox(maps, metas, proposals, model.roi_head.test_cfg, rescale=False)
    return Regions(weights, *(bbox2roi([part.bboxes for part in parts]) for parts in (proposals, found)))


def run_heads(model: nn.Module, maps: Sequence[Tensor], regions: Regions) -> None:
    """Runs the heads on the maps of the neck; regions of images that are not in ``maps`` are left out."""
    if regions.proposals is None:
        model.bbox_head(maps)
        return
    model.rpn_head(maps)
    proposals, detections = (x[x[:, 0] < len(maps[0])] for x in (regions.proposals, regions.detections))
    model.roi_head._bbox_forward(maps, proposals)
    if model.with_mask:
        model.roi_head._mask_forward(maps, detections)
