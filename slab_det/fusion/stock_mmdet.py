"""Where the norms of mmdet's own modules go: Swin, PVT, PVTv2 and their patch embedding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones import PyramidVisionTransformer, PyramidVisionTransformerV2, SwinTransformer
from mmdet.models.backbones.pvt import MixFFN, PVTEncoderLayer, SpatialReductionAttention
from mmdet.models.backbones.swin import ShiftWindowMSA, SwinBlock, WindowMSA
from mmdet.models.layers import PatchEmbed, PatchMerging
from torch import nn

from slab_det.attention import MapAttention, ShiftedWindowAttention, SoftmaxWindowAttention
from slab_det.fusion.folds import CannotFold, Fold, register_folds


def own_attention(attn: ShiftWindowMSA) -> ShiftedWindowAttention:
    """Our attention made of the layers and weights of mmdet's.

    Our attention computes the same under the same state-dict keys, and can give padding tokens another bias than qkv
    has: mmdet pads windows with zeros behind norm1 and before qkv, so its padding tokens have the bias of qkv, which
    a fold changes.

    Args:
        attn: mmdet's attention. The new one shares its layers, parameters and buffers.
    """
    theirs = attn.w_msa
    # Nothing is allocated or drawn: every tensor is taken from the original.
    with torch.device('meta'):
        w_msa = SoftmaxWindowAttention(
            theirs.embed_dims,
            theirs.num_heads,
            attn.window_size,
            attn_drop_rate=theirs.attn_drop.p,
            qk_scale=theirs.scale,
        )
        ours = ShiftedWindowAttention(w_msa, attn.shift_size, drop_path_rate=0.0)
    w_msa.relative_position_bias_table = theirs.relative_position_bias_table
    w_msa.relative_position_index = theirs.relative_position_index
    w_msa.qkv, w_msa.proj, w_msa.proj_drop = theirs.qkv, theirs.proj, theirs.proj_drop
    ours.drop = attn.drop
    ours.training, w_msa.training = attn.training, theirs.training
    return ours


def pvt_folds(backbone: nn.Module) -> Iterator[Fold]:
    """The norms behind the stages of a PVT that are no outputs."""
    return _stage_folds(backbone, set(range(len(backbone.layers))) - set(backbone.out_indices))


def pvt_output_folds(backbone: nn.Module) -> Iterator[Fold]:
    """The norms behind the stages of a PVT that are outputs, in the order of the outputs."""
    return _stage_folds(backbone, sorted(backbone.out_indices))


def _stage_folds(backbone: nn.Module, stages: Iterable[int]) -> Iterator[Fold]:
    for stage in stages:
        is_last = stage + 1 == len(backbone.layers)
        # The next patch embedding reads the norm too.
        yield Fold(f'layers.{stage}.2', before=() if is_last else f'layers.{stage + 1}.0')


def _patch_embed_input_layers(embed: PatchEmbed) -> tuple[str]:
    if embed.adap_padding:
        raise CannotFold('the next patch embedding pads the map')
    return ('projection',)


register_folds(
    PatchEmbed,
    folds=lambda embed: [Fold('norm', after='projection')],
    input_layers=_patch_embed_input_layers,
)
register_folds(
    SwinBlock,
    PVTEncoderLayer,
    folds=lambda block: [Fold('norm1', before='attn'), Fold('norm2', before='ffn')],
)
register_folds(FFN, input_layers=lambda ffn: ('layers.0.0',))

# The next stage reads what is before an output norm.
register_folds(
    SwinTransformer, output_folds=lambda backbone: [Fold(f'norm{stage}') for stage in sorted(backbone.out_indices)]
)
register_folds(ShiftWindowMSA, input_layers=ShiftedWindowAttention.input_layers, replace=own_attention)
register_folds(WindowMSA, input_layers=SoftmaxWindowAttention.input_layers)
# The norm follows all padding of the map, so the padding passes it like any token.
register_folds(PatchMerging, folds=lambda merging: [Fold('norm', before='reduction')])

register_folds(PyramidVisionTransformer, PyramidVisionTransformerV2, folds=pvt_folds, output_folds=pvt_output_folds)
register_folds(SpatialReductionAttention, folds=MapAttention.folds, input_layers=MapAttention.input_layers)
# The padding of PVTv2's depthwise convolution comes behind this layer.
register_folds(MixFFN, input_layers=lambda ffn: ('layers.0',))
