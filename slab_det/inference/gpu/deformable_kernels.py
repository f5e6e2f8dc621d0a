"""Multi-scale deformable attention as one kernel: softmax, positions of the samples, and their weighted sum."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from slab_det.families.deformable import DeformableAttention, deployed_deformable
from slab_det.families.operators import numbers
from slab_det.inference.gpu import kernels
from slab_det.inference.gpu.kernels import triton

if triton is not None:
    import triton.language as tl

    @triton.jit
    def _sample_kernel(
        values, levels, references, offsets, logits, out, N, Q, K, HEADS,
        L: tl.constexpr, P: tl.constexpr, SAMPLES: tl.constexpr, REF: tl.constexpr,
        C: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        # Sums the L * P samples of ROWS queries in one head, in all C channels. Coordinates are always float32.
        row, head = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
        known, channel, sample = row < N, tl.arange(0, CHANNELS), tl.arange(0, SAMPLES)
        image, at = (row // Q).to(tl.int64), (row.to(tl.int64) * HEADS + head) * L * P
        x = tl.load(logits + at[:, None] + sample[None, :], mask=known[:, None] & (sample < L * P)[None, :], other=0.0)
        x = tl.where((sample < L * P)[None, :], x.to(tl.float32), float('-inf'))
        largest = tl.max(x, 1)
        total = tl.sum(tl.exp(x - largest[:, None]), 1)
        sum = tl.zeros([ROWS, CHANNELS], tl.float32)
        for level in range(0, L):
            H, W, start = tl.load(levels + level * 3), tl.load(levels + level * 3 + 1), tl.load(levels + level * 3 + 2)
            reference = references + (row.to(tl.int64) * L + level) * REF
            center_x = tl.load(reference, mask=known, other=0.0)
            center_y = tl.load(reference + 1, mask=known, other=0.0)
            if REF == 4:
                width = tl.load(reference + 2, mask=known, other=0.0)
                height = tl.load(reference + 3, mask=known, other=0.0)
            for point in range(0, P):
                i = at + level * P + point
                weight = tl.exp(tl.load(logits + i, mask=known, other=0.0).to(tl.float32) - largest) / total
                dx = tl.load(offsets + i * 2, mask=known, other=0.0).to(tl.float32)
                dy = tl.load(offsets + i * 2 + 1, mask=known, other=0.0).to(tl.float32)
                if REF == 4:
                    px = (center_x + dx / P * width * 0.5) * W - 0.5
                    py = (center_y + dy / P * height * 0.5) * H - 0.5
                else:
                    px, py = center_x * W + dx - 0.5, center_y * H + dy - 0.5
                left, top = tl.floor(px), tl.floor(py)
                fx, fy = px - left, py - top
                # Clamps before the cast: coordinates far outside would overflow an integer.
                left = tl.minimum(tl.maximum(left, -2.0), W + 1.0).to(tl.int32)
                top = tl.minimum(tl.maximum(top, -2.0), H + 1.0).to(tl.int32)
                for j in tl.static_range(2):
                    for k in tl.static_range(2):
                        inside = known & (top + j >= 0) & (top + j < H) & (left + k >= 0) & (left + k < W)
                        share = weight * (fy if j == 1 else 1 - fy) * (fx if k == 1 else 1 - fx)
                        source = (image * K + start + (top + j) * W + left + k) * HEADS + head
                        read = inside[:, None] & (channel < C)[None, :]
                        value = tl.load(values + source[:, None] * C + channel[None, :], mask=read, other=0.0)
                        # The share of a sample far outside may be infinite.
                        sum += tl.where(inside, share, 0.0)[:, None] * value.to(tl.float32)
        to = out + (row.to(tl.int64) * HEADS + head)[:, None] * C + channel[None, :]
        tl.store(to, sum.to(out.dtype.element_ty), mask=known[:, None] & (channel < C)[None, :])


class TritonDeformableAttention(DeformableAttention):
    """Deformable attention that samples with one kernel where kernels run."""

    def sample(
        self,
        values: Tensor,
        sizes: tuple[tuple[int, int], ...],
        references: Tensor,
        offsets: Tensor,
        logits: Tensor,
    ) -> Tensor:
        if not kernels.can_run(values) or values.dtype.itemsize > 4:
            return super().sample(values, sizes, references, offsets, logits)
        return triton_sample_maps(values, sizes, references, offsets, logits)


# The form of mmdet's deformable attention that has a kernel.
triton_deformable = partial(deployed_deformable, attention=TritonDeformableAttention)


def triton_sample_maps(
    values: Tensor, sizes: tuple[tuple[int, int], ...], references: Tensor, offsets: Tensor, logits: Tensor
) -> Tensor:
    """See :func:`slab_det.families.deformable.sample_maps`."""
    (images, keys, heads, channels), queries = values.shape, logits.shape[1]
    num_levels, points = len(sizes), offsets.shape[4]
    starts = [sum(height * width for height, width in sizes[:i]) for i in range(num_levels)]
    levels = tuple((*size, start) for size, start in zip(sizes, starts, strict=True))
    out = torch.empty(images, queries, heads * channels, dtype=values.dtype, device=values.device)
    _sample_kernel[(triton.cdiv(images * queries, 32), heads)](
        values.contiguous(), numbers(levels, values.device, torch.int32), references.contiguous(),
        offsets.contiguous(), logits.contiguous(), out, images * queries, queries, keys, heads,
        L=num_levels, P=points, SAMPLES=triton.next_power_of_2(num_levels * points), REF=references.shape[-1],
        C=channels, CHANNELS=triton.next_power_of_2(channels), ROWS=32, num_warps=8,
    )  # fmt: skip
    return out
