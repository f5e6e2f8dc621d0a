"""Where the norms of SLABPVT and of mmdet's PVT and PVTv2 go; that of the patch embedding: see swin.py."""

from __future__ import annotations

from collections.abc import Iterator

from mmdet.models.backbones import PyramidVisionTransformer, PyramidVisionTransformerV2
from mmdet.models.backbones.pvt import MixFFN, PVTEncoderLayer, SpatialReductionAttention
from mmdet.models.layers import PatchEmbed
from torch import nn

from slab_det.attention.spatial_reduction import (
    FocusedMapAttention,
    MapAttention,
    SimplifiedMapAttention,
    SoftmaxMapAttention,
)
from slab_det.backbones.map_ffn import MapFFN, PostActMapFFN, PreActMapFFN
from slab_det.backbones.pvt import SLABPVT, PVTBlock
from slab_det.fusion.folds import Fold, find_unknown, folds_of, output_norm_of

ATTENTIONS = (SoftmaxMapAttention, SimplifiedMapAttention, FocusedMapAttention, SpatialReductionAttention)
FFNS = (MapFFN, PreActMapFFN, PostActMapFFN, MixFFN)


@folds_of(PVTBlock, PVTEncoderLayer)
def block_folds(block: PVTBlock | PVTEncoderLayer) -> Iterator[Fold]:
    # Queries come from every token, keys and values from the strided convolution where there is one.
    reduces = getattr(block.attn, 'sr_ratio', 1) > 1
    yield Fold(
        'norm1',
        ('attn.attn[q]', 'attn.sr') if reduces else 'attn.attn[qkv]',
        obstacle=find_unknown('attn', block.attn, ATTENTIONS),
    )
    # The padding of PVTv2's depthwise convolution comes behind this layer.
    yield Fold('norm2', 'ffn.layers.0', obstacle=find_unknown('ffn', block.ffn, FFNS))


@folds_of(*ATTENTIONS)
def attention_folds(attn: MapAttention | SpatialReductionAttention) -> Iterator[Fold]:
    if attn.sr_ratio > 1:
        yield Fold('norm', 'attn[kv]')


@folds_of(PreActMapFFN)
def pre_act_ffn_folds(ffn: PreActMapFFN) -> Iterator[Fold]:
    yield Fold('norm', 'layers.0', side='output')


@folds_of(PostActMapFFN)
def post_act_ffn_folds(ffn: PostActMapFFN) -> Iterator[Fold]:
    yield Fold('norm', 'layers.3')


@output_norm_of(SLABPVT, PyramidVisionTransformer, PyramidVisionTransformerV2)
def stage_norm(backbone: nn.Module, stage: int) -> Fold:
    """The norm after a stage, which the next patch embedding reads."""
    norm = f'layers.{stage}.2'
    if stage + 1 == len(backbone.layers):
        return Fold(norm, ())
    patch_embed = backbone.layers[stage + 1][0]
    obstacle = find_unknown(f'layers.{stage + 1}.0', patch_embed, [PatchEmbed])
    if not obstacle and patch_embed.adap_padding:
        # 'same' and 'corner' pad before the convolution.
        obstacle = 'the next patch embedding pads the map'
    return Fold(norm, f'layers.{stage + 1}.0.projection', obstacle=obstacle)


@folds_of(SLABPVT, PyramidVisionTransformer, PyramidVisionTransformerV2)
def inner_stage_folds(backbone: nn.Module) -> Iterator[Fold]:
    # Stages that are outputs are read outside too: see fpn.py.
    for stage in set(range(len(backbone.layers) - 1)) - set(backbone.out_indices):
        yield stage_norm(backbone, stage)
