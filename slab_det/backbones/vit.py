"""SLABViT: plain Vision Transformer (ViT, DeiT) with any norm and any attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from mmcv.cnn import build_norm_layer
from mmdet.models.layers import PatchEmbed
from mmdet.registry import MODELS
from mmengine.model import ModuleList
from mmengine.model.weight_init import trunc_normal_
from torch import Tensor, nn

from slab_det.attention import MAP_ATTENTIONS
from slab_det.backbones.arguments import check_whole, find_attention
from slab_det.backbones.base import Backbone
from slab_det.backbones.blocks import Block, LinearFFN, PositionEmbedding
from slab_det.norms.folds import Fold


@MODELS.register_module()
class SLABViT(Backbone):
    """Vision Transformer with any norm and any attention (ViT, DeiT, SLAB).

    The papers' models: DeiT-T is ``out_type='cls_token'``, and DeiT-S has ``embed_dims=384, num_heads=6``;
    DeiT-PRepBN is ``norm_cfg=dict(type='PRepBN', ln_eps=1e-6)``; SLAB-DeiT adds ``attention='sla'`` and has no class
    token, as in the authors' code: a classifier averages the tokens.

    :class:`~slab_det.backbones.SLABSwin` describes the other arguments.

    Args:
        embed_dims: Channels C.
        num_layers: Blocks.
        out_type: 'featmap' returns the map after the last norm; 'cls_token' adds a class token and returns it. A
            checkpoint of either loads into 'featmap'.

    Shape:
        (B, in_channels, H, W) -> one (B, C, H / patch_size, W / patch_size), sides rounded up, or one (B, C).
    """

    def __init__(
        self,
        pretrain_img_size: int | tuple[int, int] = 224,
        in_channels: int = 3,
        embed_dims: int = 192,
        patch_size: int = 16,
        num_layers: int = 12,
        num_heads: int = 3,
        drop_path_rate: float = 0.1,
        out_type: str = 'featmap',
        norm_cfg: dict = dict(type='LN', eps=1e-6),  # noqa: B006
        init_cfg: dict | None = None,
        attention: str = 'softmax',
        norm_eval: bool = False,
    ) -> None:
        sizes = dict(embed_dims=embed_dims, patch_size=patch_size, num_layers=num_layers, num_heads=num_heads)
        for name, value in sizes.items():
            check_whole(name, value)
        super().__init__(1, (0,), norm_cfg, norm_eval, init_cfg, pretrain_img_size)
        if out_type not in ('featmap', 'cls_token'):
            raise ValueError(f"unknown out_type {out_type!r}: choose from 'featmap' and 'cls_token'")
        self.embed = PatchEmbed(in_channels, embed_dims, kernel_size=patch_size, stride=patch_size)
        pos_shape = self.count_positions(patch_size)
        self.positions = PositionEmbedding(pos_shape, embed_dims, drop_rate=0.0)
        # No position is added to the class token: the parameter contains it.
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dims)) if out_type == 'cls_token' else None
        self.blocks = ModuleList()
        for rate in torch.linspace(0, drop_path_rate, num_layers).tolist():
            attn = find_attention(attention, MAP_ATTENTIONS)(
                embed_dims, num_heads, drop_path_rate=rate, table_shape=pos_shape
            )
            ffn = LinearFFN(embed_dims, 4 * embed_dims, dict(type='GELU'), drop_path_rate=rate)
            self.blocks.append(Block(attn, ffn, norm_cfg))
        self.norm = build_norm_layer(norm_cfg, embed_dims)[1]

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x, hw_shape = self.embed(x)
        # The convolution returns channels first. One copy here saves a copy in every layer.
        x = self.positions(x, hw_shape).contiguous()
        if self.cls_token is not None:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        for block in self.blocks:
            x = block(x, hw_shape)
        x = self.norm(x)
        if self.cls_token is not None:
            return (x[:, 0],)
        return (self.to_map(x, hw_shape),)

    def output_folds(self) -> Iterator[Fold]:
        """The last norm, whose output the neck reads."""
        yield Fold('norm')

    def init_from_scratch(self) -> None:
        super().init_from_scratch()
        trunc_normal_(self.positions.pos_embed, std=0.02)
        if self.cls_token is not None:
            trunc_normal_(self.cls_token, std=0.02)
