"""Attention in (shifted) windows: the projections of Swin (Liu et al., ICCV 2021)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mmcv.cnn.bricks.transformer import build_dropout
from mmengine.model import BaseModule
from torch import Tensor, nn

from slab_det.attention.base import Attention
from slab_det.attention.geometry import Windows, window_geometry


class WindowAttention(Attention):
    """Attention inside windows, between its projections in and out. Subclasses write :meth:`mix`.

    State-dict keys are those of mmdet's WindowMSA.

    Args:
        embed_dims: Channels C.
        num_heads: Heads h; each has d = C / h channels.
        window_size: Side w of a window; N = w * w tokens.
        qkv_bias: Whether q, k and v have a bias.
        qk_scale: Replaces 1 / sqrt(d) in softmax attention.
        attn_drop_rate: Dropout on the weights of softmax attention.
        proj_drop_rate: Dropout after the output projection.
        mask_padding: Padding tokens weigh nothing as keys of linear attention.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        window_size: int,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        attn_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        mask_padding: bool = False,
    ) -> None:
        super().__init__(embed_dims, num_heads, qk_scale, attn_drop_rate)
        self.window_size = window_size
        self.table_shape = (window_size, window_size)
        self.mask_padding = mask_padding
        self.qkv = nn.Linear(embed_dims, 3 * embed_dims, bias=qkv_bias)
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.proj_drop = nn.Dropout(proj_drop_rate)
        # What padding tokens have for q, k, v once a norm is folded into qkv; see slab_det.fusion.
        self.register_buffer('padding_qkv', None)

    def padding_row(self) -> Tensor | None:
        """What a padding token has behind qkv, (3C,), None for zero: it is zero before, so it has qkv's bias."""
        # Padding tokens never passed the norm: they must keep the unfused bias.
        return self.qkv.bias if self.padding_qkv is None else self.padding_qkv

    @torch.no_grad()
    def keep_padding(self) -> None:
        """Fixes what padding tokens have now, before something is folded into qkv."""
        if self.padding_qkv is None:
            bias = self.qkv.bias
            self.padding_qkv = self.qkv.weight.new_zeros(3 * self.embed_dims) if bias is None else bias.detach().clone()

    def input_layers(self) -> tuple[str]:
        """The layer that reads the input; see :mod:`slab_det.fusion`."""
        return ('qkv',)

    def attend(self, x: Tensor, windows: Windows) -> Tensor:
        """Mixes tokens (B, L, C) in their windows: (B, L, C), before the output projection."""
        q, k, v = windows.cut(self.qkv(x), self.padding_row(), self.groups)
        return windows.merge(self.mix(q, k, v, windows))


# (height, width, window_size, shift, device) -> the windows of a map.
WindowMaker = Callable[[int, int, int, int, torch.device], Windows]


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
        self.make_windows: WindowMaker = window_geometry

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor | None = None) -> Tensor:
        """Mixes the tokens of a map of (H, W), and adds ``identity`` where it is given."""
        windows = self.make_windows(*hw_shape, self.w_msa.window_size, self.shift_size, x.device)
        out = self.drop(self.w_msa.proj_drop(self.w_msa.proj(self.w_msa.attend(x, windows))))
        return out if identity is None else identity + out

    def input_layers(self) -> tuple[str]:
        """The module that reads the input; see :mod:`slab_det.fusion`."""
        return ('w_msa',)
