"""Where the norms of SLABPVT and of mmdet's PVT and PVTv2 go; that of the patch embedding: see swin.py."""
from __future__ import annotations

from collections.abc import Iterator

from mmdet.models.backbones import PyramidVisionTransformer, PyramidVisionTransformerV2
from mmdet.models.backbones.pvt import MixFFN, PVTEncoderLayer, SpatialReductionAttention
from torch import nn

from slab_det.backbones.pvt import SLABPVT, PVTBlock
from slab_det.layers.map_ffn import MapFFN, PostActMapFFN, PreActMapFFN
from slab_det.layers.spatial_reduction import (
    FocusedMapAttention,
    MapAttention,
    SimplifiedMapAttention,
    SoftmaxMapAttention,
)

from .folds import Fold, folds_of, output_norm_of

ATTENTIONS = (SoftmaxMapAttention, SimplifiedMapAttention, FocusedMapAttention, SpatialReductionAttention)
FFNS = (MapFFN, PreActMapFFN, PostActMapFFN, MixFFN)


@folds_of(PVTBlock, PVTEncoderLayer)
def block_folds(block: PVTBlock | PVTEncoderLayer) -> Iterator[Fold]:
    # Queries come from every token, keys and values from the strided convolution where there is one.
    reduces = getattr(block.attn, 'sr_ratio', 1) > 1
    yield Fold('norm1', ('attn.attn[q]', 'attn.sr') if reduces else 'attn.attn[qkv]',
               obstacle=_unknown(block.attn, ATTENTIONS))
    # The padding of PVTv2's depthwise convolution comes behind this layer.
    yield Fold('norm2', 'ffn.layers.0', obstacle=_unknown(block.ffn, FFNS))


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
    # 'same' and 'corner' pad before the convolution.
    obstacle = ('the next patch embedding pads the map' if backbone.layers[stage + 1][0].adap_padding else '')
    return Fold(norm, f'layers.{stage + 1}.0.projection', obstacle=obstacle)


@folds_of(SLABPVT, PyramidVisionTransformer, PyramidVisionTransformerV2)
def inner_stage_folds(backbone: nn.Module) -> Iterator[Fold]:
    # Stages that are outputs are read outside too: see fpn.py.
    for stage in set(range(len(backbone.layers) - 1)) - set(backbone.out_indices):
        yield stage_norm(backbone, stage)


def _unknown(module: nn.Module, known: tuple[type[nn.Module], ...]) -> str:
    """Why nothing can be said about what reads this module's input; '' if its type is known."""
    return '' if type(module) in known else f'{type(module).__name__} is unknown: it may do more to its input'
