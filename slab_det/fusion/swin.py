"""Where the norms of SLABSwin go."""

from __future__ import annotations

from collections.abc import Iterator

from mmcv.cnn.bricks.transformer import FFN
from mmdet.models.layers import PatchEmbed
from torch import nn

from slab_det.attention.window_attention import ATTENTIONS, ShiftedWindowAttention
from slab_det.backbones.ffn import PostActFFN, PreActFFN
from slab_det.backbones.patch_merging import PatchMerging
from slab_det.backbones.swin import SwinBlock
from slab_det.fusion.folds import Fold, find_unknown, folds_of


@folds_of(SwinBlock)
def swin_block_folds(block: SwinBlock) -> Iterator[Fold]:
    # Windows are padded after the norm: their padding tokens keep the bias that qkv has now.
    obstacle = find_unknown('attn', block.attn, [ShiftedWindowAttention]) or find_unknown(
        'attn.w_msa', block.attn.w_msa, ATTENTIONS.values()
    )
    prepare = None if obstacle else block.attn.w_msa.keep_padding
    yield Fold('norm1', 'attn.w_msa.qkv', prepare=prepare, obstacle=obstacle)
    yield Fold('norm2', 'ffn.layers.0.0', obstacle=find_unknown('ffn', block.ffn, [FFN, PreActFFN, PostActFFN]))


@folds_of(PreActFFN)
def pre_act_ffn_folds(ffn: PreActFFN) -> Iterator[Fold]:
    yield Fold('norm', 'layers.0.0', side='output')


@folds_of(PostActFFN)
def post_act_ffn_folds(ffn: PostActFFN) -> Iterator[Fold]:
    yield Fold('norm', 'layers.1')


@folds_of(PatchMerging)
def patch_merging_folds(merging: PatchMerging) -> Iterator[Fold]:
    # The norm follows the padding of odd maps, so the padding passes it like any token.
    yield Fold('norm', 'reduction')


@folds_of(PatchEmbed)
def patch_embed_folds(embed: PatchEmbed) -> Iterator[Fold]:
    is_conv = isinstance(embed.projection, nn.Conv2d)
    yield Fold('norm', 'projection', side='output', obstacle='' if is_conv else 'the projection is no Conv2d')
