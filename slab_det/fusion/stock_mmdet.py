"""Where the norms of mmdet's own modules go: Swin, PVT, PVTv2 and their patch embedding."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones import PyramidVisionTransformer, PyramidVisionTransformerV2, SwinTransformer
from mmdet.models.backbones.pvt import MixFFN, PVTEncoderLayer, SpatialReductionAttention
from mmdet.models.backbones.swin import ShiftWindowMSA, SwinBlock, WindowMSA
from mmdet.models.layers import PatchEmbed, PatchMerging
from torch import nn

from slab_det.attention.window_attention import ShiftedWindowAttention, SoftmaxWindowAttention
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


def block_folds(block: nn.Module) -> Iterator[Fold]:
    """Of a Swin block or a PVT layer."""
    yield Fold('norm1', before='attn')
    yield Fold('norm2', before='ffn')


def patch_embed_input_layers(embed: PatchEmbed) -> tuple[str]:
    if embed.adap_padding:
        raise CannotFold('the next patch embedding pads the map')
    return ('projection',)


def swin_output_folds(backbone: SwinTransformer) -> Iterator[Fold]:
    """The norms that only outputs pass: the next stage reads what is before them."""
    for stage in sorted(backbone.out_indices):
        yield Fold(f'norm{stage}')


def pvt_stage_fold(backbone: PyramidVisionTransformer, stage: int) -> Fold:
    """The norm behind a stage, which the next patch embedding reads."""
    is_last = stage + 1 == len(backbone.layers)
    return Fold(f'layers.{stage}.2', before=() if is_last else f'layers.{stage + 1}.0')


def pvt_folds(backbone: PyramidVisionTransformer) -> Iterator[Fold]:
    for stage in set(range(len(backbone.layers))) - set(backbone.out_indices):
        yield pvt_stage_fold(backbone, stage)


def pvt_output_folds(backbone: PyramidVisionTransformer) -> Iterator[Fold]:
    for stage in sorted(backbone.out_indices):
        yield pvt_stage_fold(backbone, stage)


register_folds(
    PatchEmbed,
    folds=lambda embed: [Fold('norm', after='projection')],
    input_layers=patch_embed_input_layers,
)
register_folds(FFN, input_layers=lambda ffn: ('layers.0.0',))

register_folds(SwinTransformer, output_folds=swin_output_folds)
register_folds(SwinBlock, PVTEncoderLayer, folds=block_folds)
register_folds(ShiftWindowMSA, input_layers=lambda attn: ('w_msa',), replace=own_attention)
register_folds(WindowMSA, input_layers=lambda attn: ('qkv',))
# The norm follows all padding of the map, so the padding passes it like any token.
register_folds(PatchMerging, folds=lambda merging: [Fold('norm', before='reduction')])

register_folds(PyramidVisionTransformer, PyramidVisionTransformerV2, folds=pvt_folds, output_folds=pvt_output_folds)
register_folds(
    SpatialReductionAttention,
    folds=lambda attn: [Fold('norm', before='attn[kv]')],
    # Queries come from every token, keys and values from the strided convolution where there is one.
    input_layers=lambda attn: ('attn[q]', 'sr') if attn.sr_ratio > 1 else ('attn[qkv]',),
)
# The padding of PVTv2's depthwise convolution comes behind this layer.
register_folds(MixFFN, input_layers=lambda ffn: ('layers.0',))
