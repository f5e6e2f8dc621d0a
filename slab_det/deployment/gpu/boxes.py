"""Operators on boxes whose number stays on the GPU: tensors have places for as many boxes as there could be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
import torchvision
from mmdet.models.dense_heads import RPNHead
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from torch import Tensor, nn

from slab_det.deployment.constants import constant
from slab_det.deployment.detection import EMPTY, Boxes, map_levels, numbers, set_apart
from slab_det.deployment.gpu import box_kernels, kernels

# Largest number of boxes, of all classes, that NMS reads. A CUDA graph returns whether more passed the threshold.
CANDIDATES = 4096


class FixedBoxes(Boxes):
    """Operators on tensors of fixed shapes; on a GPU they never wait for the device.

    Without kernels, operators of PyTorch and torchvision compute what mmdet computes on a CPU, to the last bit.
    """

    def priors(self, head: RPNHead, maps: Sequence[Tensor]) -> Tensor:
        sizes, device = tuple(tuple(x.shape[-2:]) for x in maps), maps[0].device
        generator = head.prior_generator
        return constant(
            (generator, sizes, device), lambda: torch.cat(generator.grid_priors(sizes, torch.float32, device))
        )

    def best(self, levels: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [len(level) for level in levels]
        width, device = max(sizes), levels[0].device
        count = min(count, width) if count > 0 else width
        if not kernels.take(levels[0]):
            scores, place = zip(*(_rank(level.sigmoid(), count, like_head=True) for level in levels), strict=True)
            scores, place = torch.stack(scores), torch.stack(place)
        else:
            # One kernel for all levels.
            rows = levels[0].new_full((len(levels), width), -torch.inf)
            for row, level in zip(rows, levels, strict=True):
                row[: len(level)] = level
            scores, place = rows.topk(count)
            there = torch.arange(count, device=device) < numbers(sizes, device)[:, None]
            scores, place = torch.where(there, scores.sigmoid(), EMPTY), torch.where(there, place, 0)
        starts = numbers([sum(sizes[:i]) for i in range(len(sizes))], device, torch.int64)
        level = numbers(range(len(sizes)), device)[:, None].expand_as(scores)
        return scores, place + starts[:, None], level

    def candidates(self, scores: Tensor, corners: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        count, stride = min(CANDIDATES, len(scores)), self.stride(corners, scores)
        if kernels.take(scores):
            best, place = scores.topk(count)
        else:
            best, place = _rank(scores, count)
        return corners[place], best, place, stride, (scores > EMPTY).sum() <= count

    def suppress(
        self, corners: Tensor, scores: Tensor, groups: Tensor, stride: Tensor, iou_threshold: float, limit: int
    ) -> tuple[Tensor, Tensor]:
        count = scores.numel()
        limit = min(limit, count) if limit > 0 else count
        if kernels.take(scores):
            return box_kernels.suppress(corners, scores, groups, stride, iou_threshold, limit)
        moved, kept = set_apart(corners, scores, groups, stride), torch.full_like(scores, EMPTY)
        for group in range(len(scores)):
            place = (scores[group] != EMPTY).nonzero()[:, 0]
            # The boxes are in order, which stable sorting keeps.
            index = place[torchvision.ops.nms(moved[group, place], scores[group, place], iou_threshold)]
            kept[group, index] = scores[group, index]
        return _rank(kept.flatten(), limit)

    def class_scores(self, logits: Tensor, found: Tensor, score_thr: float) -> Tensor:
        if kernels.take(logits):
            return box_kernels.class_scores(logits, found, score_thr)
        return super().class_scores(logits, found, score_thr)

    def decode(
        self, coder: nn.Module, priors: Tensor, deltas: Tensor, limits: Tensor, place: Tensor | None = None
    ) -> Tensor:
        if kernels.take(deltas):
            return box_kernels.decode(coder, priors, deltas, limits, place)
        return super().decode(coder, priors, deltas, limits, place)

    def stride(self, corners: Tensor, scores: Tensor) -> Tensor:
        return box_kernels.stride(corners, scores) if kernels.take(scores) else super().stride(corners, scores)

    def pool(
        self, extractor: SingleRoIExtractor, features: Sequence[Tensor], boxes: Tensor, scores: Tensor
    ) -> tuple[Tensor, None]:
        features = features[: len(extractor.roi_layers)]
        # A box without area has no samples on a GPU.
        boxes = torch.where((scores > EMPTY)[:, None], boxes, 0.0)
        levels = map_levels(extractor, boxes)
        if kernels.take(boxes) and box_kernels.can_roi_align(extractor, features):
            return box_kernels.roi_align(extractor, features, boxes, levels), None
        regions = None
        batch = boxes.new_zeros(len(boxes), 1)
        for i, (layer, feature) in enumerate(zip(extractor.roi_layers, features, strict=True)):
            here = levels == i
            pooled = layer(feature, torch.cat([batch, torch.where(here[:, None], boxes, 0.0)], 1))
            regions = pooled if regions is None else torch.where(here[:, None, None, None], pooled, regions)
        return regions, None


def _rank(scores: Tensor, count: int, like_head: bool = False) -> tuple[Tensor, Tensor]:
    """The ``count`` best scores and their places; missing scores are ``EMPTY``.

    Equal scores are in the order of places, as in NMS. With ``like_head`` and more than ``count`` scores, they are in
    the order of mmdet's heads.
    """
    found = (scores != EMPTY).nonzero()[:, 0]
    scores, order = scores[found].sort(descending=True, stable=not like_head or len(found) <= count)
    missing = max(count - len(found), 0)
    return F.pad(scores[:count], (0, missing), value=EMPTY), F.pad(found[order[:count]], (0, missing))
