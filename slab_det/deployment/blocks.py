"""Blocks of a deployed backbone: ours replace mmdet's; on a CPU they run tile by tile and write into their tokens."""

from __future__ import annotations

import torch
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones.pvt import MixFFN, PVTEncoderLayer
from mmdet.models.backbones.swin import SwinBlock
from torch import Tensor, nn

from slab_det.attention import MapAttention, ShiftedWindowAttention, WindowAttention, WindowGeometry
from slab_det.attention.geometry import join_groups, split_groups
from slab_det.backbones.blocks import Block, ConvFFN, LinearFFN
from slab_det.deployment import tiles
from slab_det.deployment.gather import WindowGatherer
from slab_det.deployment.linear import ACTIVATIONS, is_plain_linear, linear, linear_add
from slab_det.fusion.folds import CannotFold, find_hooks, find_rule
from slab_det.fusion.fuse import replace_module
from slab_det.norms import ChannelAffine

OWN_FFNS = {FFN: LinearFFN, MixFFN: ConvFFN}
# Modules defined here call a block as a whole and keep no tokens.
LIBRARIES = ('slab_det.', 'mmdet.', 'mmengine.', 'mmcv.', 'torch.')


class TiledAttention(nn.Module):
    """``x + attention(norm(x))``, tile by tile, written into x.

    Args:
        norm: The norm before the attention; an identity once it is fused.
        attention: The attention to deploy; its parameters are shared.

    Attributes:
        copies: Write into a copy of x instead.

    Shape:
        (B, H * W, C); changed in place, where it is contiguous, and returned contiguous.
    """

    def __init__(self, norm: nn.Module, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention, self.copies = norm, attention, False

    def writable(self, x: Tensor) -> Tensor:
        """The tokens (B, L, C), contiguous and free to be overwritten."""
        # Tokens of mmdet's patch embedding lie one channel after the other.
        return x.clone(memory_format=torch.contiguous_format) if self.copies else x.contiguous()


class TiledWindowAttention(TiledAttention):
    """The tiled form of a :class:`~slab_det.attention.ShiftedWindowAttention`."""

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor | None = None) -> Tensor:
        x = self.writable(x)
        w_msa, proj = self.attention.w_msa, self.attention.w_msa.proj
        geometry = *hw_shape, w_msa.window_size, self.attention.shift_size
        parts = tiles.window_tiles(*geometry, tiles.TILE_TOKENS, x.device)
        for image in x:
            for tile in parts:
                rows = image.index_select(0, tile.tokens)
                mixed = w_msa.attend(self.norm(rows), tile)
                # Every token is in one tile: nothing reads it after this.
                image.index_copy_(0, tile.tokens, linear_add(mixed, proj.weight, proj.bias, rows))
        return x


class TiledMapAttention(TiledAttention):
    """The tiled form of a :class:`~slab_det.attention.MapAttention`."""

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor | None = None) -> Tensor:
        x = self.writable(x)
        attention, out_proj = self.attention, self.attention.attn.out_proj
        normed = self.norm(x)
        source, source_shape = attention.reduce(normed, hw_shape)
        to_q, to_kv = attention.projections()
        k, v = (split_groups(part, attention.groups) for part in linear(source, *to_kv).chunk(2, dim=-1))
        shared = {}
        max_rows = tiles.TILE_TOKENS if attention.queries_apart else x.shape[1]
        for rows in tiles.row_tiles(x.shape[1], max_rows):
            tile = tiles.MapTile(hw_shape, source_shape, attention.sr_ratio > 1, rows, shared)
            q = split_groups(linear(normed[:, rows], *to_q), attention.groups)
            mixed = join_groups(attention.mix(q, k, v, tile))
            # Keys and values are there already: nothing reads these rows after this.
            x[:, rows] = linear_add(mixed, out_proj.weight, out_proj.bias, x[:, rows])
        return x


class TiledFFN(nn.Module):
    """``x + fc2(act(fc1(norm(x))))``, tile by tile, written into x.

    Args:
        norm: The norm before the FFN; an identity once it is fused.
        fc1: First layer, linear or a 1x1 convolution; its parameters are shared.
        activation: 'gelu' or 'relu'.
        fc2: Second layer.

    Shape:
        (B, L, C), contiguous; changed in place and returned.
    """

    def __init__(self, norm: nn.Module, fc1: nn.Module, activation: str, fc2: nn.Module) -> None:
        super().__init__()
        self.norm, self.fc1, self.activation, self.fc2 = norm, fc1, activation, fc2

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor) -> Tensor:
        tokens = x.view(-1, x.shape[-1])
        # A 1x1 convolution's weight has two more dimensions.
        weight1, weight2 = self.fc1.weight.flatten(1), self.fc2.weight.flatten(1)
        for rows in tiles.row_tiles(tokens.shape[0], tiles.TILE_TOKENS):
            tile = tokens[rows]
            hidden = linear(self.norm(tile), weight1, self.fc1.bias, self.activation)
            tile.copy_(linear_add(hidden, weight2, self.fc2.bias, tile))
        return x


def replace_stock_blocks(backbone: nn.Module) -> None:
    """Puts our blocks in place of mmdet's; one that computes in another way stays."""
    for name, block in _known_blocks(backbone, {SwinBlock, PVTEncoderLayer}):
        try:
            replace_module(backbone, name, _own_block(block))
        except CannotFold:
            continue


def gather_windows(backbone: nn.Module) -> None:
    """Has window attentions cut q, k and v with one gather."""
    for module in backbone.modules():
        if isinstance(module, ShiftedWindowAttention) and module.make_windows is WindowGeometry:
            module.make_windows = WindowGatherer()


def tile_blocks(backbone: nn.Module) -> None:
    """Gives our blocks attention and FFNs that work tile by tile, in place; one that computes in another way stays."""
    # Hooks may keep what a module returns, and other modules their own output or that of a block.
    copies = any(
        find_hooks(module) or not type(module).__module__.startswith(LIBRARIES)
        for module in backbone.modules()
        if module is not backbone
    )
    for _, block in _known_blocks(backbone, {Block}):
        # Others may need more than the tokens of a tile.
        if not {type(block.norm1), type(block.norm2)} <= {nn.LayerNorm, ChannelAffine, nn.Identity}:
            continue
        attention = _tile_attention(block.norm1, block.attn)
        if attention is None:
            continue
        attention.copies = copies
        block.norm1, block.attn = nn.Identity(), attention
        ffn = _tile_ffn(block.norm2, block.ffn)
        if ffn is not None:
            block.norm2, block.ffn = nn.Identity(), ffn


def _known_blocks(backbone: nn.Module, kinds: set[type]) -> list[tuple[str, nn.Module]]:
    """The blocks of exactly these kinds that no hook watches and only modules of ``LIBRARIES`` call.

    A subclass, of a block, a stage or the backbone, may call parts of a block or keep what is overwritten.
    """
    modules = list(backbone.named_modules())
    foreign = [name for name, module in modules if not type(module).__module__.startswith(LIBRARIES)]
    prefixes = tuple(f'{name}.' if name else '' for name in foreign)
    return [
        (name, block)
        for name, block in modules
        if type(block) in kinds and not name.startswith(prefixes) and not any(map(find_hooks, block.modules()))
    ]


def _own_block(block: SwinBlock | PVTEncoderLayer) -> Block:
    """Our block with the layers of mmdet's, for inference; CannotFold where it computes in another way."""
    replace, kind = find_rule(block.attn, 'replace'), OWN_FFNS.get(type(block.ffn))
    attn = replace() if replace else block.attn
    has_two_layers = kind is not LinearFFN or (block.ffn.num_fcs == 2 and block.ffn.add_identity)
    if not isinstance(attn, ShiftedWindowAttention | MapAttention) or kind is None or not has_two_layers:
        raise CannotFold('its attention or its FFN is not of mmdet')
    # Every layer is taken from the original.
    with torch.device('meta'):
        ffn = kind(1, 1, dict(type='GELU'))
        own = Block(attn, ffn, dict(type='LN'))
    ffn.layers, own.norm1, own.norm2 = block.ffn.layers, block.norm1, block.norm2
    return own.eval()


def _tile_attention(norm: nn.Module, attention: nn.Module) -> TiledAttention | None:
    """The tiled form of an attention; None where a subclass or another projection computes something else."""
    if type(attention) is ShiftedWindowAttention:
        w_msa = attention.w_msa
        is_known = type(w_msa).attend is WindowAttention.attend and is_plain_linear(w_msa.proj)
        return TiledWindowAttention(norm, attention) if is_known else None
    if isinstance(attention, MapAttention) and type(attention).forward is MapAttention.forward:
        return TiledMapAttention(norm, attention)
    return None


def _tile_ffn(norm: nn.Module, ffn: nn.Module) -> TiledFFN | None:
    """The tiled form of an FFN; None where something else is computed, such as a convolution or a norm in between."""
    if type(ffn) not in (LinearFFN, ConvFFN) or not isinstance(ffn.norm, nn.Identity):
        return None
    fc1, activation, fc2 = map(ffn.get_submodule, (ffn.fc1, ffn.activation, ffn.fc2))
    if type(ffn) is LinearFFN and not (is_plain_linear(fc1) and is_plain_linear(fc2)):
        return None
    if type(activation) not in ACTIVATIONS or getattr(activation, 'approximate', 'none') != 'none':
        return None
    return TiledFFN(norm, fc1, ACTIVATIONS[type(activation)], fc2)
