"""Window attention of a deployed Swin: norm, qkv, attention, projection and residual, tile by tile."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slab_det.attention.window_attention import (
    FocusedLinearAttention,
    ShiftedWindowAttention,
    SimplifiedLinearAttention,
    SoftmaxWindowAttention,
)
from slab_det.deployment.linear import linear, linear_add
from slab_det.deployment.tiles import WindowTile, tile_tokens, window_tiles


class DeployedWindowAttention(nn.Module):
    """``x + attention(norm(x))`` in the windows of a map, written into x.

    Args:
        norm: The norm before the attention; an identity once it is fused.
        attention: What to deploy; its parameters are shared.

    Shape:
        (B, H * W, C), contiguous; changed in place.
    """

    def __init__(self, norm: nn.Module, attention: ShiftedWindowAttention) -> None:
        super().__init__()
        self.norm = norm
        self.w_msa = attention.w_msa
        self.shift_size = attention.shift_size

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> None:
        tiles = window_tiles(
            *hw_shape, self.w_msa.window_size, self.shift_size, self.has_mask, tile_tokens(x.device), x.device
        )
        prepared = self.prepare(tiles, x.dtype)
        for image in x:
            for tile, term in zip(tiles, prepared, strict=True):
                self._attend(image, tile, term)

    def _attend(self, image: Tensor, tile: WindowTile, prepared: Tensor | None) -> None:
        msa = self.w_msa
        rows = image.index_select(0, tile.tokens)
        qkv = tile.spread(linear(self.norm(rows), msa.qkv.weight, msa.qkv.bias), msa.padding_row())
        mixed = self.mix(qkv.view(tile.num_windows, -1, 3 * msa.embed_dims), prepared)
        rows = linear_add(tile.collect(mixed.flatten(0, 1)), msa.proj.weight, msa.proj.bias, rows)
        # Every token is in one tile: nothing reads it after this.
        image.index_copy_(0, tile.tokens, rows)

    # Whether tokens of different regions must not see each other.
    has_mask: bool

    @abstractmethod
    def prepare(self, tiles: list[WindowTile], dtype: torch.dtype) -> list[Tensor | None]:
        """For each tile the term that :meth:`mix` needs and that does not depend on the tokens."""

    @abstractmethod
    def mix(self, qkv: Tensor, prepared: Tensor | None) -> Tensor:
        """Attention in each window: (m, N, 3C) -> (m, N, C)."""


class DeployedSoftmaxAttention(DeployedWindowAttention):
    """Softmax attention whose position bias and shift mask are one additive term."""

    has_mask = True

    def prepare(self, tiles: list[WindowTile], dtype: torch.dtype) -> list[Tensor]:
        bias = self.w_msa.position_bias(dtype).contiguous()
        return [bias if tile.regions is None else bias + tile.attention_mask(dtype)[:, None] for tile in tiles]

    def mix(self, qkv: Tensor, prepared: Tensor) -> Tensor:
        msa = self.w_msa
        q, k, v = qkv.unflatten(-1, (3, msa.num_heads, msa.head_dims)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, prepared, scale=msa.scale)
        return out.transpose(1, 2).flatten(2)


class DeployedLinearAttention(DeployedWindowAttention):
    """Simplified or focused linear attention."""

    has_mask = False

    def prepare(self, tiles: list[WindowTile], dtype: torch.dtype) -> list[Tensor | None]:
        if not self.w_msa.mask_padding:
            return [None] * len(tiles)
        return [None if tile.slots is None else ~tile.padding_mask() for tile in tiles]

    def mix(self, qkv: Tensor, prepared: Tensor | None) -> Tensor:
        return self.w_msa.mix(*qkv.chunk(3, dim=-1), prepared)


DEPLOYED = {
    SoftmaxWindowAttention: DeployedSoftmaxAttention,
    SimplifiedLinearAttention: DeployedLinearAttention,
    FocusedLinearAttention: DeployedLinearAttention,
}


def deploy_attention(norm: nn.Module, attention: nn.Module) -> DeployedWindowAttention | None:
    """The deployed form of a norm and the window attention behind it; None for an attention of another kind."""
    if type(attention) is not ShiftedWindowAttention or type(attention.w_msa) not in DEPLOYED:
        return None
    return DEPLOYED[type(attention.w_msa)](norm, attention)
