"""Softmax attention: in windows with a position bias (Swin), and over maps (PVT)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slab_det.attention.base import Attention, MapAttention, WindowAttention
from slab_det.attention.geometry import Geometry, repeat_windows


class SoftmaxMixing(Attention):
    """``softmax(q k^T / sqrt(d) + B) v`` per head; a base before WindowAttention or MapAttention."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> Tensor:
        bias = self.logit_bias(geometry, q.dtype)
        if bias is not None:
            bias = repeat_windows(bias, q.shape[0])
        dropout = self.attn_drop_rate if self.training else 0.0
        if torch.jit.is_tracing():
            # Exported, the function below would scale k as well and transpose it twice.
            logits = (q * self.qk_scale) @ k.transpose(-1, -2)
            return F.dropout((logits if bias is None else logits + bias).softmax(-1), dropout) @ v
        return F.scaled_dot_product_attention(q, k, v, bias, dropout, scale=self.qk_scale)

    def logit_bias(self, geometry: Geometry, dtype: torch.dtype) -> Tensor | None:
        """B, (1, h, N, M), or (nW, h, N, M) for nW windows of a map; None for none."""
        return None


class SoftmaxMapAttention(SoftmaxMixing, MapAttention):
    """Softmax attention over a map (PVT, Wang et al., ICCV 2021)."""


class SoftmaxWindowAttention(SoftmaxMixing, WindowAttention):
    """Softmax attention with relative position bias (Swin, Liu et al., ICCV 2021).

    B is the position bias of each pair of slots. Pairs from different regions of a shifted map get -100 in addition.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * self.window_size - 1) ** 2, self.num_heads))
        places = torch.cartesian_prod(torch.arange(self.window_size), torch.arange(self.window_size))
        offset = places[:, None] - places[None] + self.window_size - 1
        # The row of the table for each pair of slots, (N, N).
        self.register_buffer('relative_position_index', offset[..., 0] * (2 * self.window_size - 1) + offset[..., 1])

    def logit_bias(self, geometry: Geometry, dtype: torch.dtype) -> Tensor:
        num_slots = self.window_size**2
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        bias = bias.view(1, num_slots, num_slots, -1).permute(0, 3, 1, 2).to(dtype)
        mask = geometry.attention_mask(dtype)
        return (bias if mask is None else bias + mask[:, None]).contiguous()
