"""Attention in windows and FFNs as kernels that copy no window, and write no hidden channel to memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slab_det.attention import ShiftedWindowAttention, SoftmaxWindowAttention
from slab_det.attention.linear import SimplifiedWindowAttention
from slab_det.backbones.blocks import LinearFFN
from slab_det.deployment.blocks import ffn_layers
from slab_det.deployment.constants import constant
from slab_det.deployment.gpu import kernels
from slab_det.deployment.window_index import WindowIndex

# Logit of slots without a token: its softmax is 0, and it is finite in every dtype.
EXCLUDED_LOGIT = -1e4
# The smallest side that tl.dot multiplies, and the largest ones that a program holds.
MIN_SIDE, MAX_HEAD_DIMS, MAX_SLOTS, MAX_FFN_CHANNELS = 16, 128, 256, 192


class FusedWindowAttention(nn.Module):
    """A :class:`~slab_det.attention.ShiftedWindowAttention` that runs as kernels.

    Args:
        attention: The attention, softmax or simplified; its parameters are shared, and it runs where kernels do not.

    Attributes:
        bias: The position bias of each pair of slots, (h, N, N) for N slots rounded up to a power of 2; None without
            softmax.

    Shape:
        (B, H * W, C) -> (B, H * W, C).
    """

    def __init__(self, attention: ShiftedWindowAttention) -> None:
        super().__init__()
        self.attention = attention
        bias, w_msa = None, attention.w_msa
        if isinstance(w_msa, SoftmaxWindowAttention):
            bias = w_msa.relative_position_bias_table.detach()[w_msa.relative_position_index.flatten()]
            bias = bias.view(w_msa.window_size**2, w_msa.window_size**2, -1).permute(2, 0, 1)
            missing = _round_up(w_msa.window_size**2) - w_msa.window_size**2
            bias = F.pad(F.pad(bias, (0, missing), value=EXCLUDED_LOGIT), (0, 0, 0, missing)).contiguous()
        self.register_buffer('bias', bias, persistent=False)

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor | None = None) -> Tensor:
        w_msa, shift = self.attention.w_msa, self.attention.shift_size
        if not kernels.take(x) or x.dtype.itemsize > 4:
            return self.attention(x, hw_shape, identity)
        key = *hw_shape, w_msa.window_size, shift, x.device
        slots, regions = constant(('windows', key), lambda: find_slots(*key))
        qkv = w_msa.qkv(x)
        padding = w_msa.padding_row().to(qkv.dtype)
        if self.bias is None:
            conv, table = w_msa.dwc, w_msa.positional_encoding[0]
            mixed = kernels.linear_window_attention(qkv, padding, slots, table, conv.weight, conv.bias, w_msa.num_heads)
        else:
            mixed = kernels.window_attention(qkv, padding, slots, regions, self.bias, w_msa.qk_scale)
        out = w_msa.proj(mixed)
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
    kinds = SoftmaxWindowAttention, SimplifiedWindowAttention
    if type(layer) is not ShiftedWindowAttention or type(layer.w_msa) not in kinds:
        return None
    w_msa = layer.w_msa
    fits = MIN_SIDE <= w_msa.head_dims <= MAX_HEAD_DIMS and w_msa.head_dims & (w_msa.head_dims - 1) == 0
    # A program of the softmax holds all pairs of slots, and SLAB's windows have 56x56 slots.
    fits = fits and (type(w_msa) is SimplifiedWindowAttention or _round_up(w_msa.window_size**2) <= MAX_SLOTS)
    return FusedWindowAttention(layer) if fits else None


def _round_up(slots: int) -> int:
    return max(MIN_SIDE, 1 << (slots - 1).bit_length())


class FusedFFN(nn.Module):
    """An FFN that runs as one kernel, in half precision.

    Args:
        ffn: The FFN; its parameters are shared, and it runs where the kernel does not.

    Shape:
        (B, L, C) -> (B, L, C).
    """

    def __init__(self, ffn: LinearFFN) -> None:
        super().__init__()
        self.ffn = ffn

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor) -> Tensor:
        if not kernels.take(x) or x.dtype not in (torch.float16, torch.bfloat16):
            return self.ffn(x, hw_shape, identity)
        layers = ffn_layers(self.ffn)
        # A 1x1 convolution's weight has two more dimensions.
        weights = layers.fc1.weight.flatten(1), layers.fc1.bias, layers.fc2.weight.flatten(1), layers.fc2.bias
        return kernels.ffn(x, identity, *weights, layers.activation)


def fused_ffn(layer: nn.Module) -> FusedFFN | None:
    """The fused form of an FFN whose channels fit into one program; None for every other layer."""
    layers = ffn_layers(layer)
    if layers is None or layers.fc1.bias is None or layers.fc2.bias is None:
        return None
    channels = len(layers.fc2.weight)
    rest = channels - (1 << (channels.bit_length() - 1))
    fits = MIN_SIDE <= channels <= MAX_FFN_CHANNELS and (rest == 0 or (rest >= MIN_SIDE and rest & (rest - 1) == 0))
    return FusedFFN(layer) if fits else None
