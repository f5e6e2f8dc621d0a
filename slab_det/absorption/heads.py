"""Runs the heads of a detector on the maps of its neck, teacher and student at the same regions."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from mmdet.models.dense_heads import ATSSHead, FCOSHead, RetinaHead, RPNHead, RTMDetSepBNHead
from mmdet.models.detectors import SingleStageDetector, TwoStageDetector
from mmdet.models.roi_heads import CascadeRoIHead, StandardRoIHead
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import bbox2roi
from torch import Tensor, nn

# Most regions for a box head and for a mask head, those of the highest scores, in an image that is not the first.
PROPOSALS, DETECTIONS = 256, 32


class Regions(NamedTuple):
    """What a teacher finds in a batch, and where fits of the heads look.

    Attributes:
        weights: Weights of the positions of the dense head, the RPN or the head of a single stage, (B, 1, H, W) for
            each level. One half of their sum is equal for all positions, the other half goes by the highest score of a
            class: most positions show no object, and their outputs hardly matter.
        proposals: Regions for the box head of each stage, (n, 5): the index of the image, x1, y1, x2, y2. The later
            stages of a cascade read the regions that the teacher's earlier stages refined.
        detections: Regions for the mask heads, (n, 5); None without regions for a box head.
    """

    weights: list[Tensor]
    proposals: Sequence[Tensor] = ()
    detections: Tensor | None = None

    def position_weights(self, head: str, level: int) -> Tensor | None:
        """The weights for a head with this name; None for a head that reads regions, which weigh the same."""
        return self.weights[level] if head in ('rpn_head', 'bbox_head') else None


def has_known_heads(model: nn.Module) -> bool:
    """Whether :func:`run_heads` runs the heads: of a Faster, Mask or Cascade R-CNN, RetinaNet, ATSS, FCOS or RTMDet."""
    if isinstance(model, SingleStageDetector):
        return type(model.bbox_head) in (RetinaHead, ATSSHead, FCOSHead, RTMDetSepBNHead)
    return (
        isinstance(model, TwoStageDetector)
        and type(model.rpn_head) is RPNHead
        and type(model.roi_head) in (StandardRoIHead, CascadeRoIHead)
    )


@torch.no_grad()
def find_regions(
    model: nn.Module, images: Tensor, samples: Sequence[DetDataSample], all_regions: bool = False
) -> Regions:
    """Finds the regions of a batch (B, 3, H, W), in pixels of ``images``.

    Args:
        model: A detector with known heads.
        images: The images.
        samples: Their shapes.
        all_regions: Whether the heads read as many regions as in a test; by default at most ``PROPOSALS`` and
            ``DETECTIONS`` for each image.
    """
    maps, metas = model.extract_feat(images), [sample.metainfo for sample in samples]
    two_stages = isinstance(model, TwoStageDetector)
    scores = [x.sigmoid().amax(1, keepdim=True) for x in (model.rpn_head if two_stages else model.bbox_head)(maps)[0]]
    mean = sum(x.sum() for x in scores) / sum(x.numel() for x in scores)
    weights = [(x / mean + 1) / 2 for x in scores]
    if not two_stages:
        return Regions(weights)
    proposals = model.rpn_head.predict(maps, samples, rescale=False)
    if not all_regions:
        proposals = [part[:PROPOSALS] for part in proposals]
    rois = bbox2roi([part.bboxes for part in proposals])
    stages = []
    with ExitStack() as stack:
        for extractor in _box_extractors(model.roi_head):
            hook = extractor.register_forward_pre_hook(lambda module, args: stages.append(args[1].clone()))
            stack.callback(hook.remove)
        found = model.roi_head.predict_bbox(maps, metas, proposals, model.roi_head.test_cfg, rescale=False)
    # Without proposals no box head runs.
    stages = stages or [rois] * len(_box_extractors(model.roi_head))
    count = None if all_regions else DETECTIONS
    return Regions(weights, stages, bbox2roi([part.bboxes[:count] for part in found]))


def run_heads(model: nn.Module, maps: Sequence[Tensor], regions: Regions) -> None:
    """Runs the heads on the maps of the neck; regions of images that are not in ``maps`` are left out."""
    if not regions.proposals:
        model.bbox_head(maps)
        return
    model.rpn_head(maps)
    roi_head, detections = model.roi_head, regions.detections
    stages = [(stage,) if isinstance(roi_head, CascadeRoIHead) else () for stage in range(len(regions.proposals))]
    for stage, rois in zip(stages, regions.proposals, strict=True):
        roi_head._bbox_forward(*stage, maps, rois[rois[:, 0] < len(maps[0])])
    for stage in stages if model.with_mask else ():
        roi_head._mask_forward(*stage, maps, detections[detections[:, 0] < len(maps[0])])


def _box_extractors(roi_head: nn.Module) -> Sequence[nn.Module]:
    """The RoI extractors of the box heads, one for each stage."""
    extractors = roi_head.bbox_roi_extractor
    return extractors if isinstance(extractors, nn.ModuleList) else [extractors]
