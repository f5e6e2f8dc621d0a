"""Attention over whole maps whose keys and values may come from a reduced map: the projections of PVT."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from mmcv.cnn.bricks.transformer import build_dropout
from torch import Tensor, nn

from slab_det.attention.base import Attention
from slab_det.attention.geometry import MapGeometry, join_groups, split_groups


class MapAttention(Attention):
    """Attention over a map, with spatial reduction (PVT, Wang et al., ICCV 2021) and the projections in and out.

    Subclasses write :meth:`mix`.

    With ``sr_ratio`` r > 1 keys and values come from a strided r x r convolution of the map and a norm. Rows and
    columns that fill no r x r block are left out of them. State-dict keys are those of mmdet's
    SpatialReductionAttention.

    Args:
        embed_dims: Channels C.
        num_heads: Heads h; each has d = C / h channels.
        sr_ratio: Side r of the blocks that become one key and value.
        qkv_bias: Whether the projections have a bias; as in mmdet, those of q, k, v and of the output.
        attn_drop_rate: Dropout on the weights of softmax attention.
        proj_drop_rate: Dropout after the output projection.
        drop_path_rate: Stochastic depth.
        norm_cfg: The norm of the reduced map.
        table_shape: (H', W') of the keys' map in pretraining, which sets the rows of a table of positions.

    Shape:
        (B, H * W, C) -> (B, H * W, C).
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        sr_ratio: int = 1,
        qkv_bias: bool = True,
        attn_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        norm_cfg: dict = dict(type='LN', eps=1e-6),  # noqa: B006
        table_shape: tuple[int, int] = (1, 1),
    ) -> None:
        super().__init__(embed_dims, num_heads, attn_drop_rate=attn_drop_rate)
        self.sr_ratio = sr_ratio
        self.table_shape = table_shape
        # Holds the projections under mmdet's names; its own forward is not called.
        self.attn = nn.MultiheadAttention(embed_dims, num_heads, attn_drop_rate, bias=qkv_bias)
        self.proj_drop = nn.Dropout(proj_drop_rate)
        self.drop = build_dropout(dict(type='DropPath', drop_prob=drop_path_rate))
        if sr_ratio > 1:
            self.sr = nn.Conv2d(embed_dims, embed_dims, sr_ratio, sr_ratio)
            self.norm = build_norm_layer(norm_cfg, embed_dims)[1]

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor | None = None) -> Tensor:
        """Mixes the tokens of a map of (H, W), and adds ``identity`` where it is given."""
        source, source_shape = self.reduce(x, hw_shape)
        to_q, to_kv = self.projections()
        q, k, v = F.linear(x, *to_q), *F.linear(source, *to_kv).chunk(2, dim=-1)
        q, k, v = (split_groups(part, self.groups) for part in (q, k, v))
        mixed = self.mix(q, k, v, MapGeometry(hw_shape, source_shape, self.sr_ratio > 1))
        out = self.drop(self.proj_drop(self.attn.out_proj(join_groups(mixed))))
        return out if identity is None else identity + out

    def projections(self) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """Weight and bias that make q, and those that make k and v."""
        sizes = [self.embed_dims, 2 * self.embed_dims]
        biases = (None, None) if self.attn.in_proj_bias is None else self.attn.in_proj_bias.split(sizes)
        return tuple(zip(self.attn.in_proj_weight.split(sizes), biases, strict=True))

    def reduce(self, x: Tensor, hw_shape: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        """The tokens that keys and values come from, and the (H, W) of their map."""
        if self.sr_ratio == 1:
            return x, hw_shape
        image = self.sr(x.transpose(1, 2).unflatten(2, hw_shape))
        return self.norm(image.flatten(2).transpose(1, 2)), (image.shape[2], image.shape[3])

    def folds(self) -> Iterator[tuple[str, str]]:
        """Where the norm of the reduced map goes at inference; see :mod:`slab_det.fusion`."""
        yield 'norm', 'attn[kv]'

    def input_layers(self) -> tuple[str, ...]:
        """The layers that read the input: queries come from every token, keys and values from the reduced map."""
        return ('attn[q]', 'sr') if self.sr_ratio > 1 else ('attn[qkv]',)
