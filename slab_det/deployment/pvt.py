"""SLABPVT in its deployed form."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slab_det.attention.position_table import resize_table
from slab_det.attention.spatial_reduction import (
    FocusedMapAttention,
    MapAttention,
    SimplifiedMapAttention,
    SoftmaxMapAttention,
)
from slab_det.backbones.pvt import SLABPVT, PositionEmbedding, PVTBlock
from slab_det.deployment.ffn import deploy_ffn
from slab_det.deployment.linear import linear, linear_add
from slab_det.deployment.tiles import row_tiles, tile_tokens
from slab_det.fusion.interference import has_hooks

# (queries (B, n, C), their rows of the map) -> (B, n, C), before the output projection.
Mixer = Callable[[Tensor, slice], Tensor]


class DeployedPositionEmbedding(nn.Module):
    """Adds the position embedding, in place."""

    def __init__(self, embedding: PositionEmbedding) -> None:
        super().__init__()
        self.pos_embed, self.pos_shape = embedding.pos_embed, embedding.pos_shape

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        return x.add_(resize_table(self.pos_embed, self.pos_shape, hw_shape))


class DeployedMapAttention(nn.Module):
    """``x + attention(norm(x))`` over a map, written into x.

    Args:
        norm: The norm before the attention; an identity once it is fused.
        attention: What to deploy; its parameters are shared.

    Shape:
        (B, H * W, C), contiguous; changed in place.
    """

    def __init__(self, norm: nn.Module, attention: MapAttention) -> None:
        super().__init__()
        self.norm = norm
        self.attention = attention

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> None:
        attention = self.attention
        normed = self.norm(x)
        source, source_shape = attention.reduce(normed, hw_shape)
        to_q, to_kv = attention.projections()
        k, v = linear(source, *to_kv).chunk(2, dim=-1)
        mix = self.mixer(k, v, hw_shape, source_shape)
        out_proj = attention.attn.out_proj
        for rows in row_tiles(x.shape[1], tile_tokens(x.device)):
            mixed = mix(linear(normed[:, rows], *to_q), rows)
            # Keys and values are there already: nothing reads these rows after this.
            x[:, rows] = linear_add(mixed, out_proj.weight, out_proj.bias, x[:, rows])

    @abstractmethod
    def mixer(self, k: Tensor, v: Tensor, hw_shape: tuple[int, int], source_shape: tuple[int, int]) -> Mixer:
        """What lets queries (B, n, C), the given rows of the map, read keys and values (B, M, C)."""


class DeployedSoftmaxMapAttention(DeployedMapAttention):
    """Softmax attention with spatial reduction."""

    def mixer(self, k: Tensor, v: Tensor, hw_shape: tuple[int, int], source_shape: tuple[int, int]) -> Mixer:
        k, v = self._split_heads(k), self._split_heads(v)
        return lambda q, rows: F.scaled_dot_product_attention(self._split_heads(q), k, v).transpose(1, 2).flatten(2)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.attention.num_heads, self.attention.head_dims)).transpose(1, 2)


class DeployedLinearMapAttention(DeployedMapAttention):
    """Simplified or focused linear attention."""

    def mixer(self, k: Tensor, v: Tensor, hw_shape: tuple[int, int], source_shape: tuple[int, int]) -> Mixer:
        attention = self.attention
        position = resize_table(attention.positional_encoding, attention.source_shape, source_shape)
        summary = attention.summarize(k, v, position)
        local = attention.convolve_source(v, hw_shape, source_shape)
        return lambda q, rows: local[:, rows] + attention.read(q, summary).to(local.dtype)


DEPLOYED = {
    SoftmaxMapAttention: DeployedSoftmaxMapAttention,
    SimplifiedMapAttention: DeployedLinearMapAttention,
    FocusedMapAttention: DeployedLinearMapAttention,
}


class DeployedPVTBlock(nn.Module):
    """A block that works in place on its tokens (B, H * W, C), which must be contiguous."""

    def __init__(self, block: PVTBlock) -> None:
        super().__init__()
        self.attn = DEPLOYED[type(block.attn)](block.norm1, block.attn)
        self.deployed_ffn = deploy_ffn(block.norm2, block.ffn)
        if self.deployed_ffn is None:
            self.norm2, self.ffn = block.norm2, block.ffn

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        self.attn(x, hw_shape)
        if self.deployed_ffn is None:
            return x + self.ffn(self.norm2(x), hw_shape)
        self.deployed_ffn(x)
        return x


def deploy_block(block: nn.Module) -> nn.Module:
    """The deployed form of a block or position embedding; itself where it computes or is watched in another way."""
    if has_hooks(block):
        return block
    if type(block) is PositionEmbedding:
        return DeployedPositionEmbedding(block)
    return DeployedPVTBlock(block) if type(block) is PVTBlock and type(block.attn) in DEPLOYED else block


def deploy_pvt(backbone: SLABPVT) -> None:
    """Replaces what the backbone consists of by its deployed form, in place."""
    for _, blocks, _ in backbone.layers:
        for i, block in enumerate(blocks):
            blocks[i] = deploy_block(block)
    # Tokens are channels last: the maps are then views of them.
    backbone.memory_format = torch.channels_last
