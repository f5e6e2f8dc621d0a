"""SLABPVT: Pyramid Vision Transformer (V1 and V2) with any norm and any attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from mmcv.cnn import build_norm_layer
from mmdet.models.layers import PatchEmbed
from mmdet.registry import MODELS
from mmengine.model import ModuleList
from mmengine.model.weight_init import normal_init, trunc_normal_, trunc_normal_init
from torch import Tensor, nn

from slab_det.attention import MAP_ATTENTIONS
from slab_det.backbones.arguments import PerStage, check_whole, find_attention
from slab_det.backbones.base import Backbone
from slab_det.backbones.blocks import Block, ConvFFN, PositionEmbedding
from slab_det.norms.folds import Fold


@MODELS.register_module()
class SLABPVT(Backbone):
    """Pyramid Vision Transformer with any norm and any attention (PVT, PVTv2, SLAB, FLatten).

    Arguments, defaults and state-dict keys are as in mmdet's PyramidVisionTransformer, whose checkpoints load.
    The papers' models: PVT-S is the default, PVT-T has ``num_layers=(2, 2, 2, 2)``, PVT-M ``(3, 4, 18, 3)``;
    PVT-PRepBN is ``norm_cfg=dict(type='PRepBN', ln_eps=1e-6)``; SLAB-PVT adds ``attention='sla'``. PVTv2, mmdet's
    PyramidVisionTransformerV2, is ``patch_sizes=(7, 3, 3, 3), paddings=(3, 1, 1, 1), use_abs_pos_embed=False,
    norm_after_stage=True, use_conv_ffn=True``.

    :class:`~slab_det.backbones.SLABSwin` describes the other arguments.

    Args:
        in_channels, embed_dims: Channels of the image, and C of one head; stage i has C * num_heads[i].
        num_stages, num_layers, num_heads: Stages; blocks and heads per stage.
        patch_sizes, strides: Kernel and stride of each stage's patch embedding.
        paddings: Zeros on every side of the map before each patch embedding; 'corner' or 'same' add only the zeros
            that complete the last patches.
        sr_ratios: Spatial reduction of keys and values in the softmax stages.
        mlp_ratios: Hidden channels of the FFN, as a multiple of the stage's channels.
        qkv_bias: Whether the attention's projections have a bias: q, k, v and, as in mmdet, the output.
        use_abs_pos_embed: Add a learned position embedding in every stage, interpolated to the size of the map.
        norm_after_stage: Put a norm after each stage; the output and the next stage read it.
        use_conv_ffn: Put a depthwise 3x3 convolution into the FFN.
        la_sr_ratios: Replaces ``sr_ratios`` in stages with 'sla' or 'focused' attention.

    Shape:
        (B, in_channels, H, W) -> one (B, C * num_heads[i], H_i, W_i) per index i in ``out_indices``; H_i is
        H / 4 / 2^i rounded down, or up with the paddings of PVTv2, 'corner' or 'same'.
    """

    def __init__(
        self,
        pretrain_img_size: int | tuple[int, int] = 224,
        in_channels: int = 3,
        embed_dims: int = 64,
        num_stages: int = 4,
        num_layers: Sequence[int] = [3, 4, 6, 3],  # noqa: B006 (lists, as in mmdet)
        num_heads: Sequence[int] = [1, 2, 5, 8],  # noqa: B006
        patch_sizes: Sequence[int] = [4, 2, 2, 2],  # noqa: B006
        strides: Sequence[int] = [4, 2, 2, 2],  # noqa: B006
        paddings: Sequence[int | str] = [0, 0, 0, 0],  # noqa: B006
        sr_ratios: Sequence[int] = [8, 4, 2, 1],  # noqa: B006
        out_indices: Sequence[int] = (0, 1, 2, 3),
        mlp_ratios: Sequence[int] = [8, 8, 4, 4],  # noqa: B006
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        use_abs_pos_embed: bool = True,
        norm_after_stage: bool = False,
        use_conv_ffn: bool = False,
        act_cfg: dict = dict(type='GELU'),  # noqa: B006
        norm_cfg: dict = dict(type='LN', eps=1e-6),  # noqa: B006
        pretrained: str | None = None,
        convert_weights: bool = True,
        init_cfg: dict | None = None,
        attention: str | Sequence[str] = 'softmax',
        la_sr_ratios: Sequence[int] = (1, 1, 1, 1),
        norm_eval: bool = False,
        ffn_norm: str | None = None,
    ) -> None:
        check_whole('embed_dims', embed_dims)
        check_whole('num_stages', num_stages)
        stages = PerStage(SLABPVT, num_stages)
        num_layers, num_heads = stages.numbers('num_layers', num_layers, 0), stages.numbers('num_heads', num_heads)
        patch_sizes, strides = stages.numbers('patch_sizes', patch_sizes), stages.numbers('strides', strides)
        sr_ratios = stages.numbers('sr_ratios', sr_ratios)
        la_sr_ratios = stages.numbers('la_sr_ratios', la_sr_ratios)
        paddings, mlp_ratios = stages.values('paddings', paddings), stages.values('mlp_ratios', mlp_ratios)
        attention = stages.values('attention', attention)
        super().__init__(num_stages, out_indices, norm_cfg, norm_eval, init_cfg, pretrain_img_size, pretrained)
        sr_ratios = [sr_ratios[i] if word == 'softmax' else la_sr_ratios[i] for i, word in enumerate(attention)]
        drop_path_rates = iter(torch.linspace(0, drop_path_rate, sum(num_layers)).tolist())
        map_shape = self.pretrain_img_size
        self.layers = ModuleList()
        for i, channels in enumerate(embed_dims * num_heads[i] for i in range(num_stages)):
            patch_embed = PatchEmbed(
                in_channels,
                channels,
                kernel_size=patch_sizes[i],
                stride=strides[i],
                padding=paddings[i],
                norm_cfg=norm_cfg,
                input_size=map_shape,
            )
            in_channels, map_shape = channels, patch_embed.init_out_size
            blocks = ModuleList()
            if use_abs_pos_embed:
                # As in mmdet, which computes the size as if patches did not overlap.
                pos_shape = self.count_positions(math.prod(patch_sizes[: i + 1]))
                blocks.append(PositionEmbedding(pos_shape, channels, drop_rate))
            for _ in range(num_layers[i]):
                rate = next(drop_path_rates)
                attn = find_attention(attention[i], MAP_ATTENTIONS)(
                    channels,
                    num_heads[i],
                    sr_ratio=sr_ratios[i],
                    qkv_bias=qkv_bias,
                    proj_drop_rate=drop_rate,
                    drop_path_rate=rate,
                    norm_cfg=norm_cfg,
                    attn_drop_rate=attn_drop_rate,
                    table_shape=tuple(side // sr_ratios[i] for side in map_shape),
                )
                hidden = int(mlp_ratios[i] * channels)
                ffn = ConvFFN(channels, hidden, act_cfg, drop_rate, rate, ffn_norm, norm_cfg, use_conv=use_conv_ffn)
                blocks.append(Block(attn, ffn, norm_cfg))
            norm = build_norm_layer(norm_cfg, channels)[1] if norm_after_stage else nn.Identity()
            self.layers.append(ModuleList([patch_embed, blocks, norm]))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outs = []
        for i, (patch_embed, blocks, norm) in enumerate(self.layers):
            x, hw_shape = patch_embed(x)
            # The convolution returns channels first. One copy here saves a copy in every layer of the stage.
            x = x.contiguous()
            for block in blocks:
                x = block(x, hw_shape)
            x = norm(x)
            if i in self.out_indices:
                outs.append(self.to_map(x, hw_shape))
            x = x.transpose(1, 2).unflatten(2, hw_shape)
        return tuple(outs)

    def folds(self) -> list[Fold]:
        """The norm behind each stage, which the next patch embedding reads."""
        last = len(self.layers) - 1
        return [Fold(f'layers.{i}.2', before=f'layers.{i + 1}.0' if i < last else ()) for i in range(last + 1)]

    def output_folds(self) -> list[Fold]:
        """The norms whose outputs the backbone returns, in the order of the outputs. The neck reads them too."""
        folds = SLABPVT.folds(self)
        return [folds[stage] for stage in sorted(self.out_indices)]

    def init_from_scratch(self) -> None:
        """Initialises as mmdet does; linear attention's convolution keeps PyTorch's values, as in the authors' code."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                trunc_normal_init(module, std=0.02, bias=0.0)
            elif isinstance(module, nn.Conv2d) and not name.endswith('.dwc'):
                fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
                normal_init(module, 0, math.sqrt(2.0 / fan_out))
            elif isinstance(module, PositionEmbedding):
                trunc_normal_(module.pos_embed, std=0.02)
