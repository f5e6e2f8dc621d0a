"""The operators on boxes in an ONNX file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torchvision
from mmdet.models.roi_heads.roi_extractors import SingleRoIExtractor
from torch import Tensor, nn

from slab_det.families.operators import EMPTY, BoxOperators, PriorGenerator, map_levels, offset_groups
from slab_det.norms.base import at_least_float32


class DynamicOperators(BoxOperators):
    """Box operators for any number of boxes, built from operators that ONNX has."""

    def priors(self, generator: PriorGenerator, sizes: Sequence[tuple], like: Tensor) -> Tensor:
        return torch.cat(generator.grid_priors(sizes, like.dtype, like.device))

    def topk(self, levels: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor, Tensor]:
        found, start = [], 0
        for i, logits in enumerate(levels):
            # The tracer would store the result of Python's min() as a constant.
            size = torch._shape_as_tensor(logits)[0]
            k = torch.minimum(size, torch.tensor(count)) if count > 0 else size
            scores, index = logits.sigmoid().topk(k)
            found.append((scores, index + start, torch.zeros_like(scores) + i))
            start = start + size
        scores, index, level = (torch.cat(column)[None] for column in zip(*found, strict=True))
        return scores, index, level

    def topk_above(self, levels: Sequence[Tensor], count: int, score_thr: Tensor) -> tuple[Tensor, Tensor]:
        found, start = [], 0
        for scores in levels:
            above = _nonzero(scores > score_thr)
            size = torch._shape_as_tensor(above)[0]
            best, order = scores[above].topk(torch.minimum(size, torch.tensor(count)))
            found.append((best, above[order] + start))
            start = start + torch._shape_as_tensor(scores)[0]
        scores, index = (torch.cat(column) for column in zip(*found, strict=True))
        return scores, index

    def candidates(self, scores: Tensor, corners: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, None]:
        index = _nonzero(scores > EMPTY)
        # The reshape keeps the size of a box in the file.
        corners, scores = corners[index].reshape(-1, 4), scores[index]
        return corners, scores, index, self.stride(corners, scores), None

    def first_is_number(self, scores: Tensor) -> None:
        return None

    def suppress(
        self, corners: Tensor, scores: Tensor, groups: Tensor, stride: Tensor, iou_threshold: float, limit: int
    ) -> tuple[Tensor, Tensor]:
        moved, scores = offset_groups(corners, scores, groups, stride).reshape(-1, 4), scores.reshape(-1)
        limit = limit if limit > 0 else torch.iinfo(torch.int32).max
        index = _Suppression.apply(moved, scores, iou_threshold, limit)
        return scores[index], index

    def pool(
        self, extractor: SingleRoIExtractor, features: Sequence[Tensor], boxes: Tensor, scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See :meth:`BoxOperators.pool`; regions are in the order of levels."""
        levels = map_levels(extractor, boxes)
        members = [_nonzero(levels == i) for i in range(len(extractor.roi_layers))]
        regions = [
            torchvision.ops.roi_align(
                # Of a neck in half precision. Runtimes have a kernel for float32.
                at_least_float32(feature),
                torch.cat([torch.zeros_like(boxes[index, :1]), boxes[index]], 1),
                layer.output_size,
                layer.spatial_scale,
                layer.sampling_ratio,
                layer.aligned,
            )
            for feature, index, layer in zip(features, members, extractor.roi_layers, strict=False)
        ]
        return torch.cat(regions), torch.cat(members)

    def draw_masks(self, head: nn.Module, prototypes: Tensor, kernels: Tensor, points: Tensor) -> Tensor:
        """See :meth:`BoxOperators.draw_masks`; a file cannot hold a convolution whose groups are the objects."""
        grid = head.prior_generator.single_level_grid_priors(prototypes.shape[-2:], 0, points.dtype, points.device)
        offsets = (points[:, None, :2] - grid) / (8 * points[:, 2:3, None])
        x = torch.cat([offsets.transpose(1, 2), prototypes.flatten(1).expand(points.shape[0], -1, -1)], 1)
        parts = kernels.split([*head.weight_nums, *head.bias_nums], 1)
        num_layers = len(head.weight_nums)
        for i, (weight, bias) in enumerate(zip(parts[:num_layers], parts[num_layers:], strict=True)):
            x = torch.bmm(weight.reshape(-1, bias.shape[1], x.shape[1]), x) + bias[..., None]
            x = x.relu() if i < num_layers - 1 else x
        return x.reshape(-1, *prototypes.shape[-2:])


class _Suppression(torch.autograd.Function):
    """Greedy NMS of non-empty boxes, which keeps at most ``limit``; in ONNX, NonMaxSuppression of one class."""

    @staticmethod
    def forward(ctx: Any, boxes: Tensor, scores: Tensor, iou_threshold: float, limit: int) -> Tensor:
        index = _nonzero(scores > EMPTY)
        return index[torchvision.ops.nms(boxes[index], scores[index], iou_threshold)[:limit]]

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
