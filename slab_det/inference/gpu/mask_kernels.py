"""Pastes masks into their image with one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slab_det.inference.gpu.kernels import triton

if triton is not None:
    import triton.language as tl

    @triton.jit
    def _paste_kernel(masks, boxes, out, H, W, threshold, M: tl.constexpr, BLOCK: tl.constexpr):
        # Pastes a piece of one row of one mask.
        mask, row = tl.program_id(0), tl.program_id(1)
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        x1, y1 = tl.load(boxes + mask * 4), tl.load(boxes + mask * 4 + 1)
        x2, y2 = tl.load(boxes + mask * 4 + 2), tl.load(boxes + mask * 4 + 3)
        y = (row + 0.5 - y1) / (y2 - y1) * M - 0.5
        x = (column + 0.5 - x1) / (x2 - x1) * M - 0.5
        # If a box has no width or no height, the pixels near it read the middle of the mask, as in mmdet on a CPU.
        middle = (M - 1) * 0.5
        y = tl.where(y2 == y1, tl.where((row >= tl.floor(y1) - 1) & (row < tl.ceil(y2) + 1), middle, -2.0), y)
        near = (column >= tl.floor(x1) - 1) & (column < tl.ceil(x2) + 1)
        x = tl.where(x2 == x1, tl.where(near, middle, -2.0), x)
        top, left = tl.floor(y), tl.floor(x)
        dy, dx = y - top, x - left
        # Clamps before the cast: coordinates far outside would overflow an integer.
        top = tl.minimum(tl.maximum(top, -2.0), M + 1.0).to(tl.int32) + tl.zeros([BLOCK], tl.int32)
        left = tl.minimum(tl.maximum(left, -2.0), M + 1.0).to(tl.int32)
        value = tl.zeros([BLOCK], tl.float32)
        if (tl.max(top, 0) >= -1) & (tl.min(top, 0) < M) & (tl.max(left, 0) >= -1) & (tl.min(left, 0) < M):
            for j in tl.static_range(2):
                for i in tl.static_range(2):
                    inside = (top + j >= 0) & (top + j < M) & (left + i >= 0) & (left + i < M)
                    source = masks + mask * M * M + (top + j) * M + left + i
                    weight_y = dy if j == 1 else 1 - dy
                    weight_x = dx if i == 1 else 1 - dx
                    value += tl.load(source, mask=inside, other=0.0) * weight_y * weight_x
        tl.store(out + (mask.to(tl.int64) * H + row) * W + column, (value >= threshold).to(tl.int8), mask=column < W)


def triton_paste_masks(masks: Tensor, boxes: Tensor, shape: Sequence[int], threshold: float) -> Tensor:
    """:func:`slab_det.families.masks.paste_masks` at full size, of probabilities (n, M, M) in float32."""
    height, width = shape
    out = torch.empty(len(boxes), height, width, dtype=torch.int8, device=boxes.device)
    if out.numel():
        _paste_kernel[(len(boxes), height, triton.cdiv(width, 512))](
            masks.contiguous(), boxes.contiguous(), out, height, width, threshold, M=masks.shape[-1], BLOCK=512
        )
    return out.view(torch.bool)
