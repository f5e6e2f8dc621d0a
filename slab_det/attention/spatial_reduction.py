"""Attention over whole maps whose keys and values may come from a reduced map: softmax (PVT), SLA and focused."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from mmcv.cnn.bricks.transformer import build_dropout
from mmengine.model import BaseModule
from torch import Tensor, nn

from slab_det.attention.linear import FocusedFeatures, LinearAttention, SimplifiedFeatures
from slab_det.attention.position_table import resize_table


class MapAttention(BaseModule):
    """What attention on maps shares: spatial reduction (PVT, Wang et al., ICCV 2021) and the projections in and out.

    With ``sr_ratio`` r > 1 keys and values come from a strided r x r convolution of the map and a norm. Rows and
    columns that fill no r x r block are left out of them. State-dict keys are those of mmdet's
    SpatialReductionAttention.

    Args:
        embed_dims: Channels C.
        num_heads: Heads h; each has d = C / h channels.
        sr_ratio: Side r of the blocks that become one key and value.
        qkv_bias: Whether the projections have a bias; as in mmdet, those of q, k, v and of the output.
        attn_drop_rate: Dropout on attention weights; only softmax attention has them.
        proj_drop_rate: Dropout after the output projection.
        drop_path_rate: Stochastic depth.
        norm_cfg: The norm of the reduced map.

    Shape:
        (B, H * W, C) -> (B, H * W, C).

    Raises:
        ValueError: If ``num_heads`` does not divide ``embed_dims``.
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
    ) -> None:
        super().__init__()
        if embed_dims % num_heads:
            raise ValueError(f'num_heads={num_heads} does not divide embed_dims={embed_dims}')
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.head_dims = embed_dims // num_heads
        self.sr_ratio = sr_ratio
        self.attn_drop_rate = attn_drop_rate
        # Holds the projections under mmdet's names; its own forward is not called.
        self.attn = nn.MultiheadAttention(embed_dims, num_heads, attn_drop_rate, bias=qkv_bias)
        self.proj_drop = nn.Dropout(proj_drop_rate)
        self.drop = build_dropout(dict(type='DropPath', drop_prob=drop_path_rate))
        if sr_ratio > 1:
            self.sr = nn.Conv2d(embed_dims, embed_dims, sr_ratio, sr_ratio)
            self.norm = build_norm_layer(norm_cfg, embed_dims)[1]

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        source, source_shape = self.reduce(x, hw_shape)
        to_q, to_kv = self.projections()
        q = F.linear(x, *to_q)
        k, v = F.linear(source, *to_kv).chunk(2, dim=-1)
        out = self.attn.out_proj(self.mix(q, k, v, hw_shape, source_shape))
        return self.drop(self.proj_drop(out))

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

    @abstractmethod
    def mix(self, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int], source_shape: tuple[int, int]) -> Tensor:
        """Mixes the tokens of a map.

        Args:
            q: Queries, (B, N, C), N = H * W; no view that autograd watches.
            k: Keys, (B, M, C).
            v: Values, (B, M, C).
            hw_shape: (H, W) of the queries.
            source_shape: (H', W') of the keys and values, M = H' * W'.

        Returns:
            (B, N, C), before the output projection.
        """


class SoftmaxMapAttention(MapAttention):
    """``softmax(q k^T / sqrt(d)) v`` per head (PVT, Wang et al., ICCV 2021)."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int], source_shape: tuple[int, int]) -> Tensor:
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dims)).transpose(1, 2) for x in (q, k, v))
        dropout = self.attn_drop_rate if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2).flatten(2)


class LinearMapAttention(LinearAttention, MapAttention):
    """Linear attention over the whole map, plus a depthwise convolution of the values.

    The position table P of the keys is as large as their map is in pretraining, and interpolated to the map at hand.
    Where keys and values are reduced, the values are interpolated in two dimensions to the places of the queries
    before the convolution. The released code does so along the flattened tokens, across row ends; no published
    model reduces.

    Args:
        source_shape: (H', W') of the keys' map in pretraining.
    """

    def __init__(self, *args, source_shape: tuple[int, int], **kwargs) -> None:
        super().__init__(*args, num_positions=source_shape[0] * source_shape[1], **kwargs)
        self.source_shape = source_shape

    def mix(self, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int], source_shape: tuple[int, int]) -> Tensor:
        local = self.convolve_source(v, hw_shape, source_shape)
        out = self.attend(q, k, v, resize_table(self.positional_encoding, self.source_shape, source_shape))
        return local.add_(out.to(local.dtype))

    def convolve_source(self, v: Tensor, hw_shape: tuple[int, int], source_shape: tuple[int, int]) -> Tensor:
        """The convolution of the values at the places of the queries, (B, N, C)."""
        return self.convolve(v if self.sr_ratio == 1 else resize_table(v, source_shape, hw_shape), hw_shape)


class SimplifiedMapAttention(SimplifiedFeatures, LinearMapAttention):
    """Simplified linear attention over a map (SLAB, Guo et al., ICML 2024, eq. 5-7).

    ``O_i = ReLU(q_i) (sum_j ReLU(k_j + P_j)^T v_j) / (ReLU(q_i) sum_j ReLU(k_j + P_j) + 1e-6) + DWC(v)_i``.
    """


class FocusedMapAttention(FocusedFeatures, LinearMapAttention):
    """Focused linear attention over a map (FLatten Transformer, Han et al., ICCV 2023)."""


MAP_ATTENTIONS: dict[str, type[MapAttention]] = {
    'softmax': SoftmaxMapAttention,
    'sla': SimplifiedMapAttention,
    'focused': FocusedMapAttention,
}
