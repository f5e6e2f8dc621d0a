"""SLABSwin: Swin Transformer with any norm and any window attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from mmdet.models.layers import PatchEmbed
from mmdet.registry import MODELS
from mmengine.model import BaseModule, ModuleList
from mmengine.model.weight_init import trunc_normal_
from torch import Tensor, nn

from slab_det.attention import WINDOW_ATTENTIONS, ShiftedWindowAttention
from slab_det.attention.geometry import resize_table
from slab_det.backbones.arguments import PerStage, check_whole, count_stages, find_attention
from slab_det.backbones.base import Backbone
from slab_det.backbones.blocks import Block, LinearFFN, PatchMerging
from slab_det.common.modules import set_mode
from slab_det.norms.folds import Fold


class SwinStage(BaseModule):
    """The blocks of one resolution. The backbone calls ``downsample``, which is None in the last stage."""

    def __init__(self, blocks: Sequence[Block], downsample: PatchMerging | None) -> None:
        super().__init__()
        self.blocks = ModuleList(blocks)
        self.downsample = downsample

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        for block in self.blocks:
            x = block(x, hw_shape)
        return x


@MODELS.register_module()
class SLABSwin(Backbone):
    """Swin Transformer with any norm and any attention (Swin, SLAB, FLatten).

    Arguments, defaults and state-dict keys are as in mmdet's SwinTransformer, whose checkpoints load. The
    papers' models: Swin is the default; Swin-PRepBN is ``norm_cfg=dict(type='PRepBN')``; SLAB-Swin adds
    ``attention=('sla', 'sla', 'softmax', 'softmax'), window_sizes=(56, 28, 7, 7)``.

    Args:
        pretrain_img_size: Image size (H, W) that sets the number of learned positions.
        in_channels: Channels of the image.
        embed_dims: Channels C of the first stage; each stage doubles them.
        patch_size: Side of a patch, in pixels.
        window_size: Side of a window, in tokens.
        mlp_ratio: Hidden channels of the FFN, as a multiple of the stage's channels.
        depths: Blocks per stage.
        num_heads: Heads per stage.
        strides: Patch size, then the stride of each patch merging.
        out_indices: Stages whose output is returned.
        qkv_bias: Whether q, k and v have a bias.
        qk_scale: Replaces 1 / sqrt(d) in softmax attention.
        patch_norm: Whether patch embedding and patch merging have a norm.
        drop_rate: Dropout after the position embedding, the output projections and in the FFN.
        attn_drop_rate: Dropout on softmax attention weights.
        drop_path_rate: Stochastic depth of the last block; earlier blocks have proportionally less.
        use_abs_pos_embed: Add a learned position embedding, interpolated to the size of the map.
        act_cfg: Activation of the FFN.
        norm_cfg: Type of every norm but the output norms.
        with_cp: Recompute activations in the backward pass instead of keeping them.
        pretrained: mmdet's older spelling of ``init_cfg=dict(type='Pretrained', checkpoint=pretrained)``.
        convert_weights: Accepted for mmdet's configs; the format of a checkpoint is always detected.
        frozen_stages: 0 freezes the patch embedding, n > 0 also the first n stages; -1 freezes nothing.
        init_cfg: None, or ``dict(type='Pretrained', checkpoint=...)`` in any format that
            :func:`slab_det.load_pretrained` reads.
        attention: 'softmax', 'sla' or 'focused'; one word, or one per stage.
        window_sizes: Window side per stage; None means ``window_size`` everywhere.
        out_norm_cfg: The norm of each output: 'same' for ``norm_cfg``, a dict for another norm, None for none.
        norm_eval: Freeze running statistics that were loaded from a checkpoint. Other norms update their
            running statistics.
        ffn_norm: One more norm of ``norm_cfg`` in each FFN, before ('pre_act') or after ('post_act') the activation
            (BN+FFNBN); None for none.

    Shape:
        (B, in_channels, H, W) -> one (B, C * 2^i, H / 4 / 2^i, W / 4 / 2^i) per index i in ``out_indices``;
        sides are rounded up.

    Raises:
        ValueError: If an argument does not fit; the message names it.
    """

    def __init__(
        self,
        pretrain_img_size: int | tuple[int, int] = 224,
        in_channels: int = 3,
        embed_dims: int = 96,
        patch_size: int = 4,
        window_size: int = 7,
        mlp_ratio: int = 4,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        strides: Sequence[int] = (4, 2, 2, 2),
        out_indices: Sequence[int] = (0, 1, 2, 3),
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        patch_norm: bool = True,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        use_abs_pos_embed: bool = False,
        act_cfg: dict = dict(type='GELU'),  # noqa: B006
        norm_cfg: dict = dict(type='LN'),  # noqa: B006
        with_cp: bool = False,
        pretrained: str | None = None,
        convert_weights: bool = False,
        frozen_stages: int = -1,
        init_cfg: dict | None = None,
        attention: str | Sequence[str] = 'softmax',
        window_sizes: Sequence[int] | None = None,
        out_norm_cfg: str | dict | None = 'same',
        norm_eval: bool = False,
        ffn_norm: str | None = None,
    ) -> None:
        check_whole('embed_dims', embed_dims)
        num_stages = count_stages(depths)
        stages = PerStage(SLABSwin, num_stages)
        num_heads, strides = stages.numbers('num_heads', num_heads), stages.numbers('strides', strides)
        window_sizes = stages.numbers('window_sizes', window_size if window_sizes is None else window_sizes)
        attention = stages.values('attention', attention)
        super().__init__(num_stages, out_indices, norm_cfg, norm_eval, init_cfg, pretrain_img_size, pretrained)
        if strides[0] != patch_size:
            raise ValueError(f'patches must not overlap: strides[0]={strides[0]} differs from {patch_size=}')
        self.frozen_stages = frozen_stages
        self.num_features = [embed_dims * 2**i for i in range(num_stages)]

        patch_norm_cfg = norm_cfg if patch_norm else None
        self.patch_embed = PatchEmbed(
            in_channels, embed_dims, kernel_size=patch_size, stride=patch_size, norm_cfg=patch_norm_cfg
        )
        self.absolute_pos_embed = None
        if use_abs_pos_embed:
            self._pos_embed_shape = self.count_positions(patch_size)
            self.absolute_pos_embed = nn.Parameter(torch.zeros(1, math.prod(self._pos_embed_shape), embed_dims))
        self.drop_after_pos = nn.Dropout(drop_rate)

        drop_path_rates = iter(torch.linspace(0, drop_path_rate, sum(depths)).tolist())
        self.stages = ModuleList()
        for i, channels in enumerate(self.num_features):
            blocks = []
            for depth in range(depths[i]):
                rate = next(drop_path_rates)
                w_msa = find_attention(attention[i], WINDOW_ATTENTIONS)(
                    channels,
                    num_heads[i],
                    window_sizes[i],
                    qkv_bias=qkv_bias,
                    qk_scale=qk_scale,
                    attn_drop_rate=attn_drop_rate,
                    proj_drop_rate=drop_rate,
                )
                attn = ShiftedWindowAttention(w_msa, window_sizes[i] // 2 if depth % 2 else 0, rate)
                ffn = LinearFFN(channels, int(mlp_ratio * channels), act_cfg, drop_rate, rate, ffn_norm, norm_cfg)
                blocks.append(Block(attn, ffn, norm_cfg, with_cp))
            downsample = None
            if i < num_stages - 1:
                downsample = PatchMerging(channels, 2 * channels, strides[i + 1], patch_norm_cfg)
            self.stages.append(SwinStage(blocks, downsample))

        self.add_output_norms(out_norm_cfg, norm_cfg, self.num_features)
        # Before a distributed wrapper registers the parameters that train.
        self.freeze()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x, hw_shape = self.patch_embed(x)
        if self.absolute_pos_embed is not None:
            x = x + resize_table(self.absolute_pos_embed, self._pos_embed_shape, hw_shape, 'bicubic')
        x = self.drop_after_pos(x)
        # The convolution returns channels first. One copy here saves a copy in every layer of the first stage.
        x = x.contiguous()
        outs = []
        for i, stage in enumerate(self.stages):
            x = stage(x, hw_shape)
            if i in self.out_indices:
                outs.append(self.make_output(i, x, hw_shape))
            if stage.downsample is not None:
                x, hw_shape = stage.downsample(x, hw_shape)
        return tuple(outs)

    def output_folds(self) -> list[Fold]:
        """The output norms, in the order of the outputs. Inside the backbone nothing reads them."""
        return [Fold(f'norm{stage}') for stage in sorted(self.out_indices)]

    def freeze(self) -> None:
        """Puts the frozen stages into eval mode and stops the training of their parameters."""
        if self.frozen_stages < 0:
            return
        frozen = [self.patch_embed, self.drop_after_pos, *self.stages[: self.frozen_stages]]
        for module in frozen + [getattr(self, f'norm{i}') for i in self.out_indices if i < self.frozen_stages]:
            set_mode(module.requires_grad_(False), False)
        if self.absolute_pos_embed is not None:
            self.absolute_pos_embed.requires_grad = False

    def init_from_scratch(self) -> None:
        super().init_from_scratch()
        if self.absolute_pos_embed is not None:
            trunc_normal_(self.absolute_pos_embed, std=0.02)
