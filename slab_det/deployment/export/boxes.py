"""Boxes in the graph: decoding, suppression, and which level of the pyramid a box reads."""

from __future__ import annotations

import math
from typing import Any

import torch
import torchvision
from mmdet.models.task_modules.coders import DeltaXYWHBBoxCoder
from torch import Tensor

# mmdet's delta2bbox: no side changes by more than this.
MAX_LOG_RATIO = abs(math.log(16 / 1000))


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
