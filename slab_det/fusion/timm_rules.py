"""Fold rules for timm's ViT, DeiT and Swin. The final norm stays: ``forward_features`` returns its output."""

from __future__ import annotations

from timm.layers import Mlp, PatchEmbed
from timm.models.swin_transformer import PatchMerging, SwinTransformerBlock, WindowAttention
from timm.models.vision_transformer import Attention, Block
from torch import nn

from slab_det.norms.folds import CannotFold, Channels, Fold, Write, register_folds


def _block_writes(block: Block) -> list[Write]:
    """The layers whose output is added to the stream directly, without a LayerScale in between."""
    writes = (block.ls1, Write('attn.proj', 'norm2')), (block.ls2, Write('mlp.fc2'))
    return [write for scale, write in writes if isinstance(scale, nn.Identity)]


def _swin_block_folds(block: SwinTransformerBlock) -> list[Fold]:
    sides = zip(block.input_resolution, block.window_size, strict=True)
    # A dynamic mask means images of any size, which may need padding.
    padded = getattr(block, 'dynamic_mask', False) or any(side % window for side, window in sides)
    return [Fold('norm1', before='attn[padded]' if padded else 'attn'), Fold('norm2', before='mlp')]


def _window_input_layers(attn: WindowAttention, part: str = '') -> tuple[str]:
    if part == 'padded':
        raise CannotFold('windows are padded after the norm, and padding tokens must not pass it')
    return ('qkv',)


def _mlp_channels(mlp: Mlp) -> list[Channels]:
    if not isinstance(mlp.norm, nn.Identity) or not isinstance(mlp.fc1, nn.Linear):
        raise CannotFold('a norm stands between its layers, or they are convolutions')
    return [Channels('', ('fc1',), ('fc2',), ('act',))]


register_folds(
    Block, folds=lambda block: [Fold('norm1', before='attn'), Fold('norm2', before='mlp')], writes=_block_writes
)
# Newer timm attentions may have a gate, which also reads the input.
register_folds(Attention, input_layers=lambda attn: ('qkv', *(['gate'] if getattr(attn, 'gate', None) else [])))
register_folds(
    Mlp,
    folds=lambda mlp: [Fold('norm', before='fc2')],
    input_layers=lambda mlp: ('fc1',),
    hidden_channels=_mlp_channels,
)
# attn.proj is left out: it reads tokens in window order, not in the order of the stream.
register_folds(SwinTransformerBlock, folds=_swin_block_folds, writes=lambda block: [Write('mlp.fc2')])
register_folds(WindowAttention, input_layers=_window_input_layers)
# The map is padded before the norm.
register_folds(PatchMerging, folds=lambda merging: [Fold('norm', before='reduction')])
register_folds(PatchEmbed, folds=lambda embed: [Fold('norm', after='proj')])
