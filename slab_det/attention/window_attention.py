"""Window attention: softmax (Swin), simplified linear (SLAB, eq. 5-7) and focused linear (FLatten)."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from mmcv.cnn.bricks.transformer import build_dropout
from mmengine.model import BaseModule
from mmengine.model.weight_init import trunc_normal_
from torch import Tensor, nn

from slab_det.attention.geometry import WindowGeometry, window_geometry
from slab_det.attention.linear import FocusedFeatures, LinearAttention, SimplifiedFeatures


def relative_position_index(window_size: int) -> Tensor:
    """The row of the bias table for each pair of slots, (N, N), as in Swin."""
    coordinates = torch.stack(torch.meshgrid(torch.arange(window_size), torch.arange(window_size), indexing='ij'))
    offset = coordinates.flatten(1)[:, :, None] - coordinates.flatten(1)[:, None, :] + window_size - 1
    return offset[0] * (2 * window_size - 1) + offset[1]


class WindowAttention(BaseModule):
    """What all window attentions share: projections in and out. Subclasses mix the tokens of a window.

    Args:
        embed_dims: Channels C.
        num_heads: Heads h; each has d = C / h channels.
        window_size: Side w of a window; N = w * w tokens.
        qkv_bias: Whether q, k and v have a bias.
        attn_drop_rate: Dropout on attention weights; only softmax attention has them.
        proj_drop_rate: Dropout after the output projection.

    Raises:
        ValueError: If ``num_heads`` does not divide ``embed_dims``.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        window_size: int,
        qkv_bias: bool = True,
        attn_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if embed_dims % num_heads:
            raise ValueError(f'num_heads={num_heads} does not divide embed_dims={embed_dims}')
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.window_size = window_size
        self.head_dims = embed_dims // num_heads
        self.qkv = nn.Linear(embed_dims, 3 * embed_dims, bias=qkv_bias)
        self.attn_drop_rate = attn_drop_rate
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.proj_drop = nn.Dropout(proj_drop_rate)
        # What padding tokens have for q, k, v once a norm is folded into qkv; see slab_det.fusion.
        self.register_buffer('padding_qkv', None)

    def padding_row(self) -> Tensor | None:
        """What a padding token has behind qkv, (3C,), None for zero: it is zero before, so it has qkv's bias."""
        # Padding tokens never passed the norm: they must keep the unfused bias.
        return self.qkv.bias if self.padding_qkv is None else self.padding_qkv

    def padding(self) -> tuple[Tensor | None, ...]:
        """q, k and v of a padding token, (C,) each."""
        row = self.padding_row()
        return (None,) * 3 if row is None else row.chunk(3)

    @torch.no_grad()
    def keep_padding(self) -> None:
        """Fixes what padding tokens have now, before something is folded into qkv."""
        if self.padding_qkv is None:
            bias = self.qkv.bias
            self.padding_qkv = self.qkv.weight.new_zeros(3 * self.embed_dims) if bias is None else bias.detach().clone()

    def split_heads(self, x: Tensor) -> Tensor:
        """(B, N, C) -> (B, h, N, d)."""
        return x.unflatten(-1, (self.num_heads, self.head_dims)).transpose(1, 2)

    def input_layers(self) -> tuple[str]:
        """The layer that reads the input; see :mod:`slab_det.fusion`."""
        return ('qkv',)

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, geometry: WindowGeometry, shifted: bool) -> Tensor:
        """Mixes the tokens of each window.

        Args:
            q: Queries, (B * nW, N, C); k and v likewise.
            k: Keys.
            v: Values.
            geometry: Where the windows lie.
            shifted: Whether windows hold tokens of several regions.

        Returns:
            (B * nW, N, C), before the output projection.
        """


class SoftmaxWindowAttention(WindowAttention):
    """Softmax attention with relative position bias (Swin, Liu et al., ICCV 2021).

    ``softmax(q k^T / sqrt(d) + B) v`` per head and window; pairs from different regions of a shifted map get
    -100 on their logits.

    Args:
        qk_scale: Replaces 1 / sqrt(d).
    """

    def __init__(self, *args, qk_scale: float | None = None, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.scale = qk_scale or self.head_dims**-0.5
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * self.window_size - 1) ** 2, self.num_heads))
        self.register_buffer('relative_position_index', relative_position_index(self.window_size))
        self._cached_bias: tuple[tuple, Tensor] | None = None

    def init_weights(self) -> None:
        super().init_weights()
        trunc_normal_(self.relative_position_bias_table, std=0.02)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, geometry: WindowGeometry, shifted: bool) -> Tensor:
        q, k, v = (self.split_heads(x) for x in (q, k, v))
        bias = self._logit_bias(geometry, shifted, q.dtype)
        if bias.shape[0] > 1:
            bias = bias.expand(q.shape[0] // geometry.num_windows, *bias.shape).flatten(0, 1)
        dropout = self.attn_drop_rate if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, bias, dropout, scale=self.scale).transpose(1, 2).flatten(2)

    def position_bias(self, dtype: torch.dtype) -> Tensor:
        """The position bias of each pair of slots, (1, h, N, N)."""
        num_slots = self.window_size**2
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        return bias.view(1, num_slots, num_slots, -1).permute(0, 3, 1, 2).to(dtype)

    def _logit_bias(self, geometry: WindowGeometry, shifted: bool, dtype: torch.dtype) -> Tensor:
        """Position bias and shift mask in one term, (1, h, N, N) or (nW, h, N, N).

        At inference the one of the last size is kept.
        """
        table = self.relative_position_bias_table
        key = geometry, dtype, id(table), None if table.is_inference() else table._version
        keep = not (self.training or torch.is_grad_enabled())
        if keep and self._cached_bias is not None and self._cached_bias[0] == key:
            return self._cached_bias[1]
        bias = self.position_bias(dtype)
        if shifted:
            bias = bias + geometry.attention_mask(dtype)[:, None]
        bias = bias.contiguous()
        if keep:
            self._cached_bias = key, bias
        return bias

    # Writes through `.data`, as EMAHook does, leave no trace in the table's version; they are followed by
    # train() or eval(). Moves to another device or dtype replace the table.

    def train(self, mode: bool = True) -> SoftmaxWindowAttention:
        self._cached_bias = None
        return super().train(mode)

    def _apply(self, *args, **kwargs) -> SoftmaxWindowAttention:
        self._cached_bias = None
        return super()._apply(*args, **kwargs)


class LinearWindowAttention(LinearAttention, WindowAttention):
    """Linear attention in a window, plus a depthwise convolution of the values.

    Position is a learned addend of the keys, one per slot, instead of a bias; the shift mask does not exist:
    after a shift, tokens of several regions share one sum, as in the released code. Windows include their
    padding tokens; with ``mask_padding`` those weigh nothing as keys.

    Args:
        mask_padding: Leave padding tokens out of the sums.
    """

    def __init__(
        self, embed_dims: int, num_heads: int, window_size: int, *args, mask_padding: bool = False, **kwargs
    ) -> None:
        super().__init__(embed_dims, num_heads, window_size, *args, num_positions=window_size**2, **kwargs)
        self.mask_padding = mask_padding

    def forward(self, q: Tensor, k: Tensor, v: Tensor, geometry: WindowGeometry, shifted: bool) -> Tensor:
        keep = None
        if self.mask_padding and geometry.padding_slots.numel():
            keep = ~geometry.padding_mask().repeat(q.shape[0] // geometry.num_windows, 1)
        return self.mix(q, k, v, keep)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        """Attention and convolution; arguments as for :meth:`LinearAttention.attend`."""
        local = self.convolve(v, (self.window_size, self.window_size))
        out = self.attend(q, k, v, self.positional_encoding, keep)
        return local.add_(out.to(local.dtype))


class SimplifiedLinearAttention(SimplifiedFeatures, LinearWindowAttention):
    """ReLU linear attention plus a depthwise convolution of the values (SLAB, Guo et al., ICML 2024, eq. 5-7).

    ``O_i = ReLU(q_i) (sum_j ReLU(k_j + P_j)^T v_j) / (ReLU(q_i) sum_j ReLU(k_j + P_j) + 1e-6) + DWC(v)_i``.
    """


class FocusedLinearAttention(FocusedFeatures, LinearWindowAttention):
    """Focused linear attention plus a depthwise convolution (FLatten Transformer, Han et al., ICCV 2023)."""


ATTENTIONS: dict[str, type[WindowAttention]] = {
    'softmax': SoftmaxWindowAttention,
    'sla': SimplifiedLinearAttention,
    'focused': FocusedLinearAttention,
}


class ShiftedWindowAttention(BaseModule):
    """Attention in (shifted) windows of a feature map; state-dict keys are those of mmdet's ShiftWindowMSA.

    q, k and v are computed once per token of the map, and padding slots of the windows are filled afterwards
    with what a zero token would have become.

    Args:
        w_msa: The attention inside a window.
        shift_size: Cyclic shift, in tokens.
        drop_path_rate: Stochastic depth.

    Shape:
        (B, H * W, C) -> (B, H * W, C).
    """

    def __init__(self, w_msa: WindowAttention, shift_size: int, drop_path_rate: float) -> None:
        super().__init__()
        self.w_msa = w_msa
        self.shift_size = shift_size
        self.drop = build_dropout(dict(type='DropPath', drop_prob=drop_path_rate))

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        geometry = window_geometry(*hw_shape, self.w_msa.window_size, self.shift_size, x.device)
        q, k, v = (
            geometry.partition(part, padding)
            for part, padding in zip(self.w_msa.qkv(x).chunk(3, dim=-1), self.w_msa.padding(), strict=True)
        )
        out = geometry.merge(self.w_msa(q, k, v, geometry, self.shift_size > 0))
        return self.drop(self.w_msa.proj_drop(self.w_msa.proj(out)))

    def input_layers(self) -> tuple[str]:
        """The module that reads the input; see :mod:`slab_det.fusion`."""
        return ('w_msa',)
