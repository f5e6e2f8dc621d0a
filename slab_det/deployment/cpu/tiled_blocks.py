"""Attention and FFNs that run tile by tile on a CPU, and write their results into their input."""

from __future__ import annotations

from torch import Tensor, nn

from slab_det.attention import MapAttention, ShiftedWindowAttention, WindowAttention
from slab_det.attention.geometry import MapGeometry, join_groups, split_groups
from slab_det.backbones.blocks import Block
from slab_det.deployment.cpu import tiles
from slab_det.deployment.cpu.linear import linear, linear_add
from slab_det.deployment.replacements import FFNLayers, is_plain_linear, known_blocks, known_ffn
from slab_det.norms import ChannelAffine


class TiledAttention(nn.Module):
    """``x + attention(norm(x))``, tile by tile, written into x.

    Args:
        norm: The norm before the attention; an identity once it is fused.
        attention: The attention to deploy; its parameters are shared.

    Shape:
        (B, H * W, C); a contiguous input is overwritten and returned.
    """

    def __init__(self, norm: nn.Module, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = norm, attention


class TiledWindowAttention(TiledAttention):
    """A :class:`~slab_det.attention.ShiftedWindowAttention` that runs tile by tile."""

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor | None = None) -> Tensor:
        # mmdet's patch embedding returns a transposed view.
        x = x.contiguous()
        w_msa, proj = self.attention.w_msa, self.attention.w_msa.proj
        geometry = *hw_shape, w_msa.window_size, self.attention.shift_size
        parts = tiles.window_tiles(*geometry, tiles.TILE_TOKENS, x.device)
        for image in x:
            for tile in parts:
                rows = image.index_select(0, tile.tokens)
                mixed = w_msa.attend(self.norm(rows), tile)
                written = linear_add(mixed, proj.weight, proj.bias, rows)
                # No other tile reads these tokens. Under autocast, products have another dtype than the stream.
                image.index_copy_(0, tile.tokens, written.to(image.dtype))
        return x


class TiledMapAttention(TiledAttention):
    """A :class:`~slab_det.attention.MapAttention` that runs tile by tile if its queries are independent."""

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor | None = None) -> Tensor:
        # mmdet's patch embedding returns a transposed view.
        x = x.contiguous()
        attention, out_proj = self.attention, self.attention.attn.out_proj
        normed = self.norm(x)
        source, source_shape = attention.reduce(normed, hw_shape)
        to_q, to_kv = attention.projections()
        k, v = (split_groups(part, attention.groups) for part in linear(source, *to_kv).chunk(2, dim=-1))
        geometry = MapGeometry(hw_shape, source_shape, attention.sr_ratio > 1)
        max_rows = tiles.TILE_TOKENS if attention.queries_apart else x.shape[1]
        for rows in tiles.row_tiles(x.shape[1], max_rows):
            q = split_groups(linear(normed[:, rows], *to_q), attention.groups)
            mixed = join_groups(attention.mix(q, k, v, geometry))
            # Nothing reads these rows again: keys and values are computed already.
            x[:, rows] = linear_add(mixed, out_proj.weight, out_proj.bias, x[:, rows])
        return x


class TiledFFN(nn.Module):
    """``x + ffn(norm(x))``, tile by tile, written into x.

    Args:
        norm: The norm before the FFN; an identity once it is fused.
        layers: The layers of the FFN; their parameters are shared.

    Shape:
        (B, L, C), contiguous; changed in place and returned.
    """

    def __init__(self, norm: nn.Module, layers: FFNLayers) -> None:
        super().__init__()
        self.norm = norm
        self.fc1, self.activation, self.fc2 = layers

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor) -> Tensor:
        tokens = x.view(-1, x.shape[-1])
        # A 1x1 convolution's weight has two more dimensions.
        weight1, weight2 = self.fc1.weight.flatten(1), self.fc2.weight.flatten(1)
        for rows in tiles.row_tiles(tokens.shape[0], tiles.TILE_TOKENS):
            tile = tokens[rows]
            hidden = linear(self.norm(tile), weight1, self.fc1.bias, self.activation)
            tile.copy_(linear_add(hidden, weight2, self.fc2.bias, tile))
        return x


def tile_blocks(backbone: nn.Module) -> None:
    """Replaces attention and FFNs of our blocks by tiled ones, in place; a block that computes something else stays."""
    for _, block in known_blocks(backbone, {Block}):
        # Other norms may need more than the tokens of a tile.
        if not {type(block.norm1), type(block.norm2)} <= {nn.LayerNorm, ChannelAffine, nn.Identity}:
            continue
        attention, kind = block.attn, None
        if type(attention) is ShiftedWindowAttention:
            w_msa = attention.w_msa
            if type(w_msa).attend is WindowAttention.attend and is_plain_linear(w_msa.proj):
                kind = TiledWindowAttention
        elif isinstance(attention, MapAttention) and type(attention).forward is MapAttention.forward:
            kind = TiledMapAttention
        if kind is None:
            continue
        block.norm1, block.attn = nn.Identity(), kind(block.norm1, attention)
        layers = known_ffn(block.ffn)
        if layers is not None:
            block.norm2, block.ffn = nn.Identity(), TiledFFN(block.norm2, layers)
