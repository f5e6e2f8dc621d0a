"""Attention in windows, in one kernel: nothing is cut, padded, rolled or merged."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slab_det.attention import ShiftedWindowAttention
from slab_det.attention.softmax import SoftmaxWindowAttention
from slab_det.deployment.constants import constant
from slab_det.deployment.gpu import kernels
from slab_det.deployment.window_index import WindowIndex
from slab_det.fusion.folds import find_hooks

# Behind a softmax, nothing; a number of every dtype.
EXCLUDED_LOGIT = -1e4
# What tl.dot multiplies, and what one program holds.
MIN_SIDE, MAX_HEAD_DIMS, MAX_SLOTS = 16, 128, 256


class FusedWindowAttention(nn.Module):
    """The form of a softmax :class:`~slab_det.attention.ShiftedWindowAttention` for kernels.

    Args:
        attention: The attention; its parameters are shared, and it computes where there are no kernels.

    Attributes:
        bias: The position bias of each pair of slots, (h, N, N) for N slots rounded up to a power of 2.

    Shape:
        (B, H * W, C) -> (B, H * W, C).
    """

    def __init__(self, attention: ShiftedWindowAttention) -> None:
        super().__init__()
        self.attention = attention
        w_msa = attention.w_msa
        slots = w_msa.window_size**2
        bias = w_msa.relative_position_bias_table.detach()[w_msa.relative_position_index.flatten()]
        bias = bias.view(slots, slots, -1).permute(2, 0, 1)
        missing = _round_up(slots) - slots
        bias = F.pad(F.pad(bias, (0, missing), value=EXCLUDED_LOGIT), (0, 0, 0, missing))
        self.register_buffer('bias', bias.contiguous(), persistent=False)

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor | None = None) -> Tensor:
        w_msa, shift = self.attention.w_msa, self.attention.shift_size
        if not kernels.take(x) or x.dtype.itemsize > 4:
            return self.attention(x, hw_shape, identity)
        key = *hw_shape, w_msa.window_size, shift, x.device
        slots, regions = constant(('windows', key), lambda: find_slots(*key))
        qkv = w_msa.qkv(x)
        padding = w_msa.padding_row().to(qkv.dtype)
        out = w_msa.proj(kernels.window_attention(qkv, padding, slots, regions, self.bias, w_msa.qk_scale))
        return out if identity is None else out.add_(identity)


def find_slots(
    height: int, width: int, window_size: int, shift: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """The token in each slot and the region of each slot, (nW, N) each, as kernels read them; see WindowIndex."""
    index = WindowIndex(height, width, window_size, shift, device)
    missing = _round_up(window_size**2) - window_size**2
    tokens = torch.where(index.tokens == height * width, kernels.PADDING, index.tokens)
    regions = index.regions()
    return (
        F.pad(tokens, (0, missing), value=kernels.NOTHING).int(),
        None if regions is None else F.pad(regions, (0, missing)).int(),
    )


def fused_windows(layer: nn.Module) -> FusedWindowAttention | None:
    """The fused form of an attention in windows; None for every other layer."""
    if type(layer) is not ShiftedWindowAttention or type(layer.w_msa) is not SoftmaxWindowAttention:
        return None
    w_msa = layer.w_msa
    fits = MIN_SIDE <= w_msa.head_dims <= MAX_HEAD_DIMS and w_msa.head_dims & (w_msa.head_dims - 1) == 0
    fits = fits and _round_up(w_msa.window_size**2) <= MAX_SLOTS
    return FusedWindowAttention(layer) if fits and not any(map(find_hooks, layer.modules())) else None


def _round_up(slots: int) -> int:
    return max(MIN_SIDE, 1 << (slots - 1).bit_length())
