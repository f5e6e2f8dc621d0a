"""Attention of a deployed block: norm, attention, projection and residual, tile by tile, in place."""

from __future__ import annotations

from torch import Tensor, nn

from slab_det.attention import MapAttention, ShiftedWindowAttention, WindowAttention
from slab_det.attention.geometry import join_groups, split_groups
from slab_det.deployment.linear import linear, linear_add
from slab_det.deployment.tiles import MapTile, row_tiles, tile_tokens, window_tiles


class TiledWindowAttention(nn.Module):
    """``x + attention(norm(x))`` in the windows of a map, written into x.

    Args:
        norm: The norm before the attention; an identity once it is fused.
        attention: What to deploy; its parameters are shared.

    Shape:
        (B, H * W, C), contiguous; changed in place and returned.
    """

    def __init__(self, norm: nn.Module, attention: ShiftedWindowAttention) -> None:
        super().__init__()
        self.norm = norm
        self.w_msa = attention.w_msa
        self.shift_size = attention.shift_size

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor | None = None) -> Tensor:
        proj = self.w_msa.proj
        tiles = window_tiles(*hw_shape, self.w_msa.window_size, self.shift_size, tile_tokens(x.device), x.device)
        for image in x:
            for tile in tiles:
                rows = image.index_select(0, tile.tokens)
                mixed = self.w_msa.attend(self.norm(rows), tile)
                # Every token is in one tile: nothing reads it after this.
                image.index_copy_(0, tile.tokens, linear_add(mixed, proj.weight, proj.bias, rows))
        return x


class TiledMapAttention(nn.Module):
    """``x + attention(norm(x))`` over a map, written into x.

    Args:
        norm: The norm before the attention; an identity once it is fused.
        attention: What to deploy; its parameters are shared.

    Shape:
        (B, H * W, C), contiguous; changed in place and returned.
    """

    def __init__(self, norm: nn.Module, attention: MapAttention) -> None:
        super().__init__()
        self.norm = norm
        self.attention = attention

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor | None = None) -> Tensor:
        attention, out_proj = self.attention, self.attention.attn.out_proj
        normed = self.norm(x)
        source, source_shape = attention.reduce(normed, hw_shape)
        to_q, to_kv = attention.projections()
        k, v = (split_groups(part, attention.groups) for part in linear(source, *to_kv).chunk(2, dim=-1))
        shared = {}
        for rows in row_tiles(x.shape[1], tile_tokens(x.device)):
            tile = MapTile(hw_shape, source_shape, attention.sr_ratio > 1, rows, shared)
            q = split_groups(linear(normed[:, rows], *to_q), attention.groups)
            mixed = join_groups(attention.mix(q, k, v, tile))
            # Keys and values are there already: nothing reads these rows after this.
            x[:, rows] = linear_add(mixed, out_proj.weight, out_proj.bias, x[:, rows])
        return x


def deploy_attention(norm: nn.Module, attention: nn.Module) -> nn.Module | None:
    """The deployed form of a norm and the attention behind it; None where more than the mathematics is its own."""
    if type(attention) is ShiftedWindowAttention and type(attention.w_msa).attend is WindowAttention.attend:
        return TiledWindowAttention(norm, attention)
    if isinstance(attention, MapAttention) and type(attention).forward is MapAttention.forward:
        return TiledMapAttention(norm, attention)
    return None
