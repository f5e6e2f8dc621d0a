"""Where the norms of mmdet's SwinTransformer go; its patch embedding is that of SLABSwin, see swin.py."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.backbones.swin import ShiftWindowMSA, SwinBlock, WindowMSA
from mmdet.models.layers import PatchMerging

from slab_det.attention.window_attention import ShiftedWindowAttention, SoftmaxWindowAttention
from slab_det.fusion.folds import Fold, find_unknown, folds_of


@folds_of(SwinBlock)
def mmdet_swin_block_folds(block: SwinBlock) -> Iterator[Fold]:
    # mmdet pads windows with zeros after norm1 and before qkv, so padding tokens have the bias of qkv, which the fold
    # changes. Our attention computes the same and can keep theirs apart.
    yield Fold(
        'norm1',
        'attn.w_msa.qkv',
        prepare=partial(_replace_attention, block),
        obstacle=(
            find_unknown('attn', block.attn, [ShiftWindowMSA])
            or find_unknown('attn.w_msa', block.attn.w_msa, [WindowMSA])
        ),
    )
    yield Fold('norm2', 'ffn.layers.0.0', obstacle=find_unknown('ffn', block.ffn, [FFN]))


@folds_of(PatchMerging)
def mmdet_patch_merging_folds(merging: PatchMerging) -> Iterator[Fold]:
    # The norm follows all padding of the map, so the padding passes it like any token.
    yield Fold('norm', 'reduction')


def own_attention(attn: ShiftWindowMSA) -> ShiftedWindowAttention:
    """Our attention made of the layers and weights of mmdet's.

    It computes the same under the same state-dict keys, and can give padding tokens another bias than qkv has.

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


def _replace_attention(block: SwinBlock) -> None:
    block.attn = own_attention(block.attn)
    block.attn.w_msa.keep_padding()
