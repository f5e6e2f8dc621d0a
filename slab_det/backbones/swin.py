"""SLABSwin: Swin Transformer with any norm and any window attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as cp
from mmcv.cnn import build_norm_layer
from mmdet.models.layers import PatchEmbed
from mmdet.registry import MODELS
from mmengine.model import BaseModule, ModuleList
from mmengine.model.weight_init import trunc_normal_, trunc_normal_init
from mmengine.utils import to_2tuple
from torch import Tensor, nn

from slab_det.attention import WINDOW_ATTENTIONS, LinearMixing, ShiftedWindowAttention, SoftmaxWindowAttention
from slab_det.backbones.arguments import (
    check_mlp_ratio,
    check_norm_cfg,
    check_out_indices,
    check_whole_numbers,
    per_stage,
)
from slab_det.backbones.base import freeze_loaded_statistics, init_backbone
from slab_det.backbones.ffn import build_ffn
from slab_det.backbones.patch_merging import PatchMerging
from slab_det.checkpoints import register_load_check
from slab_det.fusion import Fold


class SwinBlock(BaseModule):
    """``x + attn(norm1(x))``, then ``x + ffn(norm2(x))``.

    Args:
        attn: The attention of a shifted or unshifted block.
        embed_dims: Channels C.
        feedforward_channels: Hidden channels of the FFN.
        drop_rate: Dropout in the FFN.
        drop_path_rate: Stochastic depth of the FFN.
        act_cfg: Activation of the FFN.
        norm_cfg: Both norms.
        with_cp: Recompute activations in the backward pass instead of keeping them.
        ffn_norm: One more norm in the FFN, before ('pre_act') or after ('post_act') its activation.

    Shape:
        (B, H * W, C) -> (B, H * W, C).
    """

    def __init__(
        self,
        attn: ShiftedWindowAttention,
        embed_dims: int,
        feedforward_channels: int,
        drop_rate: float,
        drop_path_rate: float,
        act_cfg: dict,
        norm_cfg: dict,
        with_cp: bool,
        ffn_norm: str | None,
    ) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.norm1 = build_norm_layer(norm_cfg, embed_dims)[1]
        self.attn = attn
        self.norm2 = build_norm_layer(norm_cfg, embed_dims)[1]
        self.ffn = build_ffn(
            ffn_norm,
            norm_cfg,
            embed_dims=embed_dims,
            feedforward_channels=feedforward_channels,
            act_cfg=act_cfg,
            ffn_drop=drop_rate,
            dropout_layer=dict(type='DropPath', drop_prob=drop_path_rate),
        )

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        if self.with_cp and x.requires_grad:
            return cp.checkpoint(self._forward, x, hw_shape, use_reentrant=False)
        return self._forward(x, hw_shape)

    def _forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        x = self.attn(self.norm1(x), hw_shape, identity=x)
        return self.ffn(self.norm2(x), identity=x)

    def folds(self) -> Iterator[Fold]:
        """Where the norms go at inference; see :mod:`slab_det.fusion`."""
        yield Fold('norm1', before='attn')
        yield Fold('norm2', before='ffn')


class SwinStage(BaseModule):
    """The blocks of one resolution and, but for the last stage, the patch merging that follows them."""

    def __init__(self, blocks: Sequence[SwinBlock], downsample: PatchMerging | None) -> None:
        super().__init__()
        self.blocks = ModuleList(blocks)
        self.downsample = downsample

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        for block in self.blocks:
            x = block(x, hw_shape)
        return x


@MODELS.register_module()
class SLABSwin(BaseModule):
    """Swin Transformer whose norms and attention are chosen by a word (Swin, SLAB, FLatten).

    Arguments, defaults and state-dict keys are those of mmdet's SwinTransformer, whose checkpoints load. The rows
    of the papers: Swin is the default; Swin-PRepBN is ``norm_cfg=dict(type='PRepBN')``; SLAB-Swin adds
    ``attention=('sla', 'sla', 'softmax', 'softmax'), window_sizes=(56, 28, 7, 7)``.

    Args:
        pretrain_img_size: Image size (H, W) that sets the number of absolute position embeddings.
        in_channels: Channels of the image.
        embed_dims: Channels C of the first stage; each stage doubles them.
        patch_size: Side of a patch, in pixels.
        window_size: Side of a window, in tokens.
        mlp_ratio: Hidden channels of the FFN over C.
        depths: Blocks per stage.
        num_heads: Heads per stage.
        strides: Patch size, then the stride of each patch merging.
        out_indices: Stages whose output is returned.
        qkv_bias: Whether q, k and v have a bias.
        qk_scale: Replaces 1 / sqrt(d) in softmax attention.
        patch_norm: Whether patch embedding and patch merging have a norm.
        drop_rate: Dropout.
        attn_drop_rate: Dropout on softmax attention weights.
        drop_path_rate: Stochastic depth of the last block; earlier blocks have proportionally less.
        use_abs_pos_embed: Add a learned position embedding, interpolated to the map at hand.
        act_cfg: Activation of the FFN.
        norm_cfg: Every norm but the output norms.
        with_cp: Recompute activations in the backward pass instead of keeping them.
        pretrained: mmdet's older spelling of ``init_cfg=dict(type='Pretrained', checkpoint=pretrained)``.
        convert_weights: Accepted for mmdet's configs; the format of a checkpoint is always detected.
        frozen_stages: Patch embedding (0) and stages (1...) that do not train; -1 freezes nothing.
        init_cfg: None, or ``dict(type='Pretrained', checkpoint=...)`` in any format that
            :func:`slab_det.load_pretrained` reads.
        attention: 'softmax', 'sla' or 'focused'; one word, or one per stage.
        window_sizes: Window side per stage; None means ``window_size`` everywhere.
        mask_padding: Padding tokens weigh nothing as keys of linear attention. The released code counts them.
        out_norm_cfg: The output norms: 'same' takes ``norm_cfg``, a dict another norm, None none.
        norm_eval: Keep the running statistics that were loaded from a checkpoint frozen in training. Norms
            whose statistics were not loaded stay live.
        ffn_norm: One more norm of ``norm_cfg`` in each FFN, before ('pre_act') or after ('post_act') the activation
            (BN+FFNBN); None for none.

    Shape:
        (B, in_channels, H, W) -> one (B, C * 2^i, H / 4 / 2^i, W / 4 / 2^i) per index i in ``out_indices``;
        sides are rounded up.

    Raises:
        ValueError: If an attention, norm or ``ffn_norm`` is unknown, a per-stage argument has not one entry per stage,
            a number is not positive or not whole, heads do not divide channels, or there is no such output.
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
        mask_padding: bool = False,
        out_norm_cfg: str | dict | None = 'same',
        norm_eval: bool = False,
        ffn_norm: str | None = None,
    ) -> None:
        if pretrained is not None:
            if init_cfg is not None:
                raise ValueError('init_cfg and pretrained name two sources of weights: give one')
            init_cfg = dict(type='Pretrained', checkpoint=pretrained)
        super().__init__(init_cfg=init_cfg)
        register_load_check(self)
        num_stages = len(depths)
        attention = per_stage('attention', attention, num_stages)
        window_sizes = per_stage('window_sizes', window_size if window_sizes is None else window_sizes, num_stages)
        num_heads = per_stage('num_heads', num_heads, num_stages)
        strides = per_stage('strides', strides, num_stages)
        unknown = set(attention) - set(WINDOW_ATTENTIONS)
        if unknown:
            raise ValueError(f'unknown attention {sorted(unknown)}: choose from {sorted(WINDOW_ATTENTIONS)}')
        check_whole_numbers(
            embed_dims=embed_dims,
            num_heads=num_heads,
            window_sizes=window_sizes,
            strides=strides,
            patch_size=patch_size,
        )
        check_whole_numbers(0, depths=depths)
        check_out_indices(out_indices, num_stages)
        check_norm_cfg('norm_cfg', norm_cfg)
        if strides[0] != patch_size:
            raise ValueError(f'patches must not overlap: strides[0]={strides[0]} differs from {patch_size=}')
        self.out_indices = tuple(out_indices)
        self.frozen_stages = frozen_stages
        self.norm_eval = norm_eval
        self.num_features = [embed_dims * 2**i for i in range(num_stages)]

        self.patch_embed = PatchEmbed(
            in_channels,
            embed_dims,
            kernel_size=patch_size,
            stride=patch_size,
            norm_cfg=norm_cfg if patch_norm else None,
        )
        self.absolute_pos_embed = None
        if use_abs_pos_embed:
            self._pos_embed_shape = tuple(side // patch_size for side in to_2tuple(pretrain_img_size))
            num_patches = self._pos_embed_shape[0] * self._pos_embed_shape[1]
            self.absolute_pos_embed = nn.Parameter(torch.zeros(1, num_patches, embed_dims))
        self.drop_after_pos = nn.Dropout(drop_rate)

        drop_path_rates = iter(torch.linspace(0, drop_path_rate, sum(depths)).tolist())
        self.stages = ModuleList()
        for i, channels in enumerate(self.num_features):
            check_mlp_ratio('mlp_ratio', mlp_ratio, channels)
            blocks = []
            for depth in range(depths[i]):
                rate = next(drop_path_rates)
                w_msa = WINDOW_ATTENTIONS[attention[i]](
                    channels,
                    num_heads[i],
                    window_sizes[i],
                    qkv_bias=qkv_bias,
                    qk_scale=qk_scale,
                    attn_drop_rate=attn_drop_rate,
                    proj_drop_rate=drop_rate,
                    mask_padding=mask_padding,
                )
                shift_size = window_sizes[i] // 2 if depth % 2 else 0
                blocks.append(
                    SwinBlock(
                        ShiftedWindowAttention(w_msa, shift_size, rate),
                        channels,
                        int(mlp_ratio * channels),
                        drop_rate,
                        rate,
                        act_cfg,
                        norm_cfg,
                        with_cp,
                        ffn_norm,
                    )
                )
            downsample = None
            if i < num_stages - 1:
                downsample = PatchMerging(channels, 2 * channels, strides[i + 1], norm_cfg if patch_norm else None)
            self.stages.append(SwinStage(blocks, downsample))

        out_norm_cfg = norm_cfg if out_norm_cfg == 'same' else out_norm_cfg
        if out_norm_cfg:
            check_norm_cfg('out_norm_cfg', out_norm_cfg)
        for i in self.out_indices:
            norm = build_norm_layer(out_norm_cfg, self.num_features[i])[1] if out_norm_cfg else nn.Identity()
            self.add_module(f'norm{i}', norm)
        # Of the maps returned.
        self.memory_format = torch.contiguous_format
        # Before a distributed wrapper counts which parameters train.
        self._freeze()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x, hw_shape = self.patch_embed(x)
        if self.absolute_pos_embed is not None:
            x = x + self._position_embedding(hw_shape)
        x = self.drop_after_pos(x)
        # The convolution leaves tokens one channel after the other, and every layer of the first stage would copy them.
        x = x.contiguous()
        outs = []
        for i, stage in enumerate(self.stages):
            x = stage(x, hw_shape)
            if i in self.out_indices:
                out = getattr(self, f'norm{i}')(x)
                image = out.transpose(1, 2).unflatten(2, hw_shape)
                outs.append(image.contiguous(memory_format=self.memory_format))
            if stage.downsample is not None:
                x, hw_shape = stage.downsample(x, hw_shape)
        return tuple(outs)

    def output_folds(self) -> Iterator[Fold]:
        """The norms that only outputs pass, in the order of the outputs: the next stage reads what is before them."""
        for i in sorted(self.out_indices):
            yield Fold(f'norm{i}')

    def _position_embedding(self, hw_shape: tuple[int, int]) -> Tensor:
        """The absolute position embedding, (1, H * W, C), at the size of the map."""
        if hw_shape == self._pos_embed_shape:
            return self.absolute_pos_embed
        image = self.absolute_pos_embed.transpose(1, 2).unflatten(2, self._pos_embed_shape)
        return F.interpolate(image, hw_shape, mode='bicubic', align_corners=False).flatten(2).transpose(1, 2)

    def train(self, mode: bool = True) -> SLABSwin:
        """Sets training mode, but for frozen stages and, with ``norm_eval``, loaded statistics."""
        super().train(mode)
        self._freeze()
        if mode and self.norm_eval:
            freeze_loaded_statistics(self)
        return self

    def _freeze(self) -> None:
        for module in self._frozen_modules():
            module.eval()
            module.requires_grad_(False)
        if self.frozen_stages >= 0 and self.absolute_pos_embed is not None:
            self.absolute_pos_embed.requires_grad = False

    def _frozen_modules(self) -> list[nn.Module]:
        if self.frozen_stages < 0:
            return []
        frozen = [self.patch_embed, self.drop_after_pos, *self.stages[: self.frozen_stages]]
        return frozen + [getattr(self, f'norm{i}') for i in self.out_indices if i < self.frozen_stages]

    def init_weights(self) -> None:
        init_backbone(self, self._init_from_scratch)

    def _init_from_scratch(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_init(module, std=0.02, bias=0.0)
            elif isinstance(module, SoftmaxWindowAttention):
                trunc_normal_(module.relative_position_bias_table, std=0.02)
            elif isinstance(module, LinearMixing):
                nn.init.zeros_(module.positional_encoding)
        if self.absolute_pos_embed is not None:
            trunc_normal_(self.absolute_pos_embed, std=0.02)
