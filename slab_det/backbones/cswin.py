"""SLABCSwin: CSWin Transformer (Dong et al., CVPR 2022) with any norm and any attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from mmdet.models.layers import PatchEmbed
from mmdet.registry import MODELS
from mmengine.model import BaseModule, ModuleList
from torch import Tensor, nn

from slab_det.attention import STRIPE_ATTENTIONS, MapAttention
from slab_det.attention.geometry import MapGeometry, join_groups, split_groups
from slab_det.backbones.arguments import PerStage, check_whole, count_stages, find_attention
from slab_det.backbones.base import Backbone
from slab_det.backbones.blocks import Block, LinearFFN
from slab_det.backbones.swin import SLABSwin


class Stripes(BaseModule):
    """Attention inside the stripes of a map, plus a depthwise convolution of each stripe's values (LePE).

    Where the stripe width does not divide the map, zeros are added to both sides of q, k and v, not to the tokens:
    padding never passes a norm or its fold. :class:`StripeAttention` describes the other arguments.

    Args:
        axis: 1 for horizontal stripes, across all columns; 2 for vertical ones, across all rows.

    Shape:
        q, k and v, (B, H * W, C) each -> (B, H * W, C).
    """

    def __init__(
        self,
        word: str,
        embed_dims: int,
        num_heads: int,
        axis: int,
        width: int | None,
        map_shape: tuple[int, int],
        attn_drop_rate: float,
    ) -> None:
        super().__init__()
        self.axis, self.width = axis, width
        shape = map_shape if width is None else (width, map_shape[1]) if axis == 1 else (map_shape[0], width)
        self.attn = find_attention(word, STRIPE_ATTENTIONS)(embed_dims, num_heads, shape, attn_drop_rate=attn_drop_rate)
        self.get_v = nn.Conv2d(embed_dims, embed_dims, 3, padding=1, groups=embed_dims)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        q, k, v = (self.cut(part.unflatten(1, hw_shape)) for part in (q, k, v))
        shape = (v.shape[1], v.shape[2])
        local = self.get_v(v.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        # Contiguous: mix() may overwrite q, which must not be a view of the map.
        q, k, v = (split_groups(part.flatten(1, 2).contiguous(), self.attn.groups) for part in (q, k, v))
        mixed = join_groups(self.attn.mix(q, k, v, MapGeometry(shape, shape, False))).unflatten(1, shape)
        return self.merge(mixed + local, hw_shape).flatten(1, 2)

    def cut(self, image: Tensor) -> Tensor:
        """Cuts a map (B, H, W, C) into n vertical stripes (B * n, H, w, C) or horizontal ones (B * n, w, W, C)."""
        if self.width is None:
            return image
        missing = -image.shape[self.axis] % self.width
        # A trace pads always: it serves sizes that the width does not divide too.
        if torch.jit.is_tracing() or missing:
            pads = [missing // 2, missing - missing // 2]
            image = F.pad(image, [0, 0, *pads] if self.axis == 2 else [0, 0, 0, 0, *pads])
        return image.unflatten(self.axis, (-1, self.width)).movedim(self.axis, 1).flatten(0, 1)

    def merge(self, stripes: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Puts stripes back into the map (B, H, W, C); padding is dropped."""
        if self.width is None:
            return stripes
        side = hw_shape[self.axis - 1]
        missing = -side % self.width
        num_stripes = (side + missing) // self.width
        image = stripes.unflatten(0, (-1, num_stripes)).movedim(1, self.axis).flatten(self.axis, self.axis + 1)
        return image.narrow(self.axis, missing // 2, side)


class StripeAttention(MapAttention):
    """Attention in cross-shaped windows: half of the heads in vertical stripes, the other half in horizontal ones.

    Args:
        word: The attention inside a stripe, one of ``STRIPE_ATTENTIONS``.
        embed_dims: Channels C.
        num_heads: Heads, an even number.
        width: Width of the stripes, in tokens; None for all heads over the whole map.
        map_shape: (H, W) of the map in pretraining, which sets the rows of tables of positions.
        attn_drop_rate: Dropout on softmax attention weights.
        drop_path_rate: Stochastic depth.

    Shape:
        (B, H * W, C) -> (B, H * W, C).
    """

    # Stripes split the channels into heads themselves.
    splits_heads = False

    def __init__(
        self,
        word: str,
        embed_dims: int,
        num_heads: int,
        width: int | None,
        map_shape: tuple[int, int],
        attn_drop_rate: float,
        drop_path_rate: float,
    ) -> None:
        super().__init__(embed_dims, num_heads, drop_path_rate=drop_path_rate)
        axes = (2, 1) if width else (2,)
        if num_heads % len(axes):
            raise ValueError(
                f'num_heads={num_heads}: half of the heads attend in stripes of each direction; give even numbers, or '
                'stripe_widths=None for this stage'
            )
        sizes = embed_dims // len(axes), num_heads // len(axes)
        self.attns = ModuleList(Stripes(word, *sizes, axis, width, map_shape, attn_drop_rate) for axis in axes)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, geometry: MapGeometry) -> Tensor:
        channels, mixed = self.embed_dims // len(self.attns), []
        for i, stripes in enumerate(self.attns):
            # Slices, not chunk(): an attention may overwrite q, and autograd refuses to overwrite one of chunk's views.
            part = slice(i * channels, (i + 1) * channels)
            mixed.append(stripes(*(x[:, 0, :, part] for x in (q, k, v)), geometry.query_shape))
        return torch.cat(mixed, dim=-1)[:, None]


@MODELS.register_module()
class SLABCSwin(Backbone):
    """CSWin Transformer with any norm and any attention (CSWin, SLAB, FLatten).

    The papers' models: CSWin-T is the default, CSWin-S has ``depths=(2, 4, 32, 2)``. SLAB-CSWin-T is
    ``depths=(2, 4, 18, 1), attention=('sla', 'sla', 'softmax', 'softmax'), stripe_widths=(None, None, 7, None),
    norm_cfg=dict(type='PRepBN')``. Maps of any size are cut and padded as in the authors' code for segmentation.

    :class:`~slab_det.backbones.SLABSwin` describes the other arguments.

    Args:
        stripe_widths: Width of the stripes per stage, in tokens; None for one window that is the whole map.

    Shape:
        (B, 3, H, W) -> one (B, C * 2^i, H_i, W_i) per index i in ``out_indices``; H_0 is (H + 1) / 4 rounded down,
        each further side half of the one before rounded up.
    """

    def __init__(
        self,
        pretrain_img_size: int | tuple[int, int] = 224,
        embed_dims: int = 64,
        depths: Sequence[int] = (1, 2, 21, 1),
        num_heads: Sequence[int] = (2, 4, 8, 16),
        stripe_widths: Sequence[int | None] = (1, 2, 7, None),
        mlp_ratio: int = 4,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.2,
        norm_cfg: dict = dict(type='LN'),  # noqa: B006
        init_cfg: dict | None = None,
        attention: str | Sequence[str] = 'softmax',
        out_norm_cfg: str | dict | None = 'same',
        norm_eval: bool = False,
    ) -> None:
        check_whole('embed_dims', embed_dims)
        num_stages = count_stages(depths)
        stages = PerStage(SLABCSwin, num_stages)
        num_heads, stripe_widths = stages.numbers('num_heads', num_heads), stages.values('stripe_widths', stripe_widths)
        check_whole('stripe_widths', [width for width in stripe_widths if width is not None])
        attention = stages.values('attention', attention)
        super().__init__(num_stages, out_indices, norm_cfg, norm_eval, init_cfg, pretrain_img_size)
        num_features = [embed_dims * 2**i for i in range(num_stages)]
        drop_path_rates = iter(torch.linspace(0, drop_path_rate, sum(depths)).tolist())
        in_channels, map_shape = 3, self.pretrain_img_size
        self.stages = ModuleList()
        for i, channels in enumerate(num_features):
            kernel, stride, padding = (3, 2, 1) if i else (7, 4, 2)
            patch_embed = PatchEmbed(
                in_channels, channels, 'Conv2d', kernel, stride, padding, norm_cfg=norm_cfg, input_size=map_shape
            )
            in_channels, map_shape = channels, patch_embed.init_out_size
            blocks = ModuleList()
            for _ in range(depths[i]):
                rate = next(drop_path_rates)
                attn = StripeAttention(
                    attention[i], channels, num_heads[i], stripe_widths[i], map_shape, attn_drop_rate, rate
                )
                ffn = LinearFFN(channels, int(mlp_ratio * channels), dict(type='GELU'), drop_path_rate=rate)
                blocks.append(Block(attn, ffn, norm_cfg))
            self.stages.append(ModuleList([patch_embed, blocks]))
        self.add_output_norms(out_norm_cfg, norm_cfg, num_features)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        outs = []
        for i, (patch_embed, blocks) in enumerate(self.stages):
            x, hw_shape = patch_embed(x)
            # The convolution returns channels first. One copy here saves a copy in every layer of the stage.
            x = x.contiguous()
            for block in blocks:
                x = block(x, hw_shape)
            if i in self.out_indices:
                outs.append(self.make_output(i, x, hw_shape))
            x = x.transpose(1, 2).unflatten(2, hw_shape)
        return tuple(outs)

    output_folds = SLABSwin.output_folds
