"""The parts of our backbones that cache something per size, written as arithmetic on sizes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from mmcv.cnn import Linear
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones.swin import ShiftWindowMSA
from mmdet.models.layers import PatchEmbed
from mmdet.models.layers import PatchMerging as MmdetPatchMerging
from torch import Tensor, nn

from slab_det.attention.window_attention import (
    LinearWindowAttention,
    ShiftedWindowAttention,
    SoftmaxWindowAttention,
    WindowAttention,
)
from slab_det.backbones.patch_merging import PatchMerging
from slab_det.deployment.export.token_index import WindowIndex, gather_rows
from slab_det.fusion.stock_mmdet import own_attention
from slab_det.runtime.errors import ExportError


class SizeFreeAttention(nn.Module):
    """Our :class:`ShiftedWindowAttention` at inference, for one image, with nothing kept from size to size.

    One gather cuts windows, splits heads and fills padding at once, and one puts the tokens back.

    Args:
        attn: Gives its layers and weights.

    Shape:
        (1, H * W, C) -> (1, H * W, C).
    """

    def __init__(self, attn: ShiftedWindowAttention) -> None:
        super().__init__()
        self.shift_size = attn.shift_size
        self.w_msa = attn.w_msa
        self.mix = _mix_of(attn.w_msa)

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        w_msa = self.w_msa
        index = WindowIndex(*hw_shape, w_msa.window_size, self.shift_size)
        return w_msa.proj(self.mix(w_msa, self._padded_qkv(x), index, self.shift_size > 0))[None]

    def _padded_qkv(self, x: Tensor) -> Tensor:
        """q, k and v of each token and, in the last row, of a padding token: (H * W + 1, 3C)."""
        qkv = self.w_msa.qkv(x[0])
        padding = self.w_msa.padding()
        row = qkv.new_zeros(3 * self.w_msa.embed_dims) if padding[0] is None else torch.cat(padding)
        return torch.cat([qkv, row.to(qkv.dtype)[None]])


def _mix_of(w_msa: WindowAttention) -> object:
    if isinstance(w_msa, SoftmaxWindowAttention):
        return mix_softmax
    if isinstance(w_msa, LinearWindowAttention):
        return mix_linear
    raise ExportError(f'{type(w_msa).__name__} has no export form: add one to slab_det/export/backbones.py')


def mix_softmax(w_msa: SoftmaxWindowAttention, qkv: Tensor, index: WindowIndex, shifted: bool) -> Tensor:
    """``softmax(q k^T / sqrt(d) + B) v`` in windows.

    Args:
        w_msa: The attention.
        qkv: (H * W + 1, 3C), the last row that of padding.
        index: Where tokens go.
        shifted: Whether windows hold tokens of several regions.

    Returns:
        (H * W, C), before the output projection.
    """
    heads, num_slots = w_msa.num_heads, w_msa.window_size**2
    # Each row of qkv is 3 h rows of d channels.
    rows = qkv.reshape(-1, w_msa.head_dims)
    first = index.tokens()[:, None] * (3 * heads) + torch.arange(heads)[:, None]
    q, k, v = (gather_rows(rows, first + part * heads) for part in range(3))
    bias = w_msa.relative_position_bias_table[w_msa.relative_position_index.reshape(-1)]
    bias = bias.reshape(num_slots, num_slots, heads).permute(2, 0, 1)[None].to(q.dtype)
    if shifted:
        bias = bias + index.attention_mask(q.dtype)[:, None]
    out = ((q * w_msa.scale) @ k.transpose(-1, -2) + bias).softmax(-1) @ v
    window, slot = index.slots()
    place = (window[:, None] * heads + torch.arange(heads)) * num_slots + slot[:, None]
    return gather_rows(out.reshape(-1, w_msa.head_dims), place).reshape(-1, w_msa.embed_dims)


def mix_linear(w_msa: LinearWindowAttention, qkv: Tensor, index: WindowIndex, shifted: bool) -> Tensor:
    """Linear attention in windows plus the depthwise convolution; arguments and result as :func:`mix_softmax`."""
    rows = qkv.reshape(-1, w_msa.embed_dims)
    first = index.tokens() * 3
    q, k, v = (gather_rows(rows, first + part) for part in range(3))
    local = w_msa.convolve(v, (w_msa.window_size, w_msa.window_size))
    keep = ~index.padding() if w_msa.mask_padding else None
    out = local + w_msa.attend(q, k, v, w_msa.positional_encoding, keep).to(local.dtype)
    window, slot = index.slots()
    return gather_rows(out.reshape(-1, w_msa.embed_dims), window * w_msa.window_size**2 + slot)


class SizeFreePatchEmbed(nn.Module):
    """mmdet's PatchEmbed whose padding at the bottom right does not depend on the size.

    One patch more than needed is padded; where sides are whole patches the convolution leaves it out.

    Args:
        embed: Gives its layers; its patches do not overlap.
    """

    def __init__(self, embed: PatchEmbed) -> None:
        super().__init__()
        self.projection = embed.projection
        self.norm = embed.norm
        height, width = embed.projection.stride
        self.pad = (0, width - 1, 0, height - 1)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Tokens (1, H * W, C) of an image, and their (H, W)."""
        x = self.projection(F.pad(x, self.pad))
        hw_shape = (x.shape[2], x.shape[3])
        x = x.flatten(2).transpose(1, 2)
        return (x if self.norm is None else self.norm(x)), hw_shape


class RowsLinear(nn.Module):
    """A linear layer on the rows of one image: a Gemm, whose bias an int8 kernel takes, and no MatMul and Add.

    Args:
        linear: The layer.

    Shape:
        (1, L, C) -> (1, L, C').
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[0])[None]


def make_size_free(model: nn.Module) -> None:
    """Replaces, in place, every module whose forward depends on sizes in another way than by arithmetic.

    Raises:
        ExportError: If an attention has no export form.
    """
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is ShiftWindowMSA:
                child = own_attention(child)
            if isinstance(child, ShiftedWindowAttention):
                setattr(parent, name, SizeFreeAttention(child))
            elif isinstance(child, MmdetPatchMerging):
                setattr(parent, name, own_merging(child))
            elif isinstance(child, PatchEmbed) and child.adap_padding is not None:
                setattr(parent, name, _size_free_embedding(child))
            elif isinstance(child, FFN):
                _use_rows(child)


def _use_rows(ffn: FFN) -> None:
    for parent in (ffn.layers, ffn.layers[0]):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, Linear):
                setattr(parent, name, RowsLinear(child))


def _size_free_embedding(embed: PatchEmbed) -> SizeFreePatchEmbed:
    projection = embed.projection
    if embed.adap_padding.padding != 'corner' or projection.kernel_size != projection.stride:
        raise ExportError("a patch embedding that pads by 'same', or whose patches overlap, has no export form")
    return SizeFreePatchEmbed(embed)


def own_merging(merging: MmdetPatchMerging) -> PatchMerging:
    """Our patch merging with the layers of mmdet's, whose weights are permuted in place."""
    if merging.reduction.in_features != 4 * merging.in_channels or merging.sampler.stride != (2, 2):
        raise ExportError('the patch merging of this mmdet Swin does not take 2x2 blocks: it has no export form')
    with torch.device('meta'):
        ours = PatchMerging(merging.in_channels, merging.out_channels)
    state = merging.state_dict()
    ours.norm, ours.reduction = merging.norm, merging.reduction
    ours.load_state_dict({key: value.clone() for key, value in state.items()})
    return ours
