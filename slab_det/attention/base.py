"""Attention layers: in (shifted) windows, as in Swin, and over maps, as in PVT."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from mmcv.cnn.bricks.transformer import build_dropout
from mmengine.model import BaseModule
from torch import Tensor, nn

from slab_det.attention.geometry import (
    Geometry,
    MapGeometry,
    WindowGeometry,
    Windows,
    join_groups,
    repeat_windows,
    split_groups,
)
from slab_det.norms.folds import Channels, Fold


class Attention(BaseModule):
    """Base class of attention. Subclasses write :meth:`mix`; training, deployment and export call it.

    Args:
        embed_dims: Channels C.
        num_heads: Heads h; each has d = C / h channels, or fewer after :meth:`keep_head_dims`.
        table_shape: Size (H', W') of a table of positions: the keys' window, or the keys' map in pretraining.
        qk_scale: Factor of the logits; None means 1 / sqrt(d).
        attn_drop_rate: Dropout on softmax attention weights.

    Raises:
        ValueError: If the heads do not divide the channels.
    """

    # Whether mix() gets q, k and v split by head, (B, h, N, d), or whole, (B, 1, N, C).
    splits_heads = True

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        table_shape: tuple[int, int],
        qk_scale: float | None = None,
        attn_drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dims % num_heads:
            raise ValueError(
                f'{embed_dims} channels cannot be split into num_heads={num_heads} heads; give num_heads that divide '
                'the channels of their stage'
            )
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.table_shape = table_shape
        self.head_dims = embed_dims // num_heads
        self.qk_scale = qk_scale or self.head_dims**-0.5
        self.attn_drop_rate = attn_drop_rate

    def keep_head_dims(self, head_dims: int, rows: Tensor) -> None:
        """Sets d after only these ``rows`` of the projection to q, k and v were left; the factor of the logits stays.

        q, k and v lose the same number of channels: PyTorch's fused kernels for CPUs need one width, and without
        them softmax attention takes 2 to 5 times as long.
        """
        self.head_dims = head_dims

    @property
    def groups(self) -> int:
        """The number of channel groups that :meth:`mix` gets: the heads, or 1."""
        return self.num_heads if self.splits_heads else 1

    @abstractmethod
    def mix(self, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> Tensor:
        """Computes the attention output of every query from projected q, k and v.

        Args:
            q: Queries (B, h, N, d) of B windows or maps; may be overwritten.
            k: Keys (B, h, M, d).
            v: Values (B, h, M, d).
            geometry: The layout of the tokens.

        Returns:
            (B, h, N, d), before the output projection.
        """


class SoftmaxMixing(Attention):
    """``softmax(q k^T / sqrt(d) + B) v`` per head; a mixin for WindowAttention and MapAttention."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> Tensor:
        bias = self.logit_bias(geometry, q.dtype)
        if bias is not None:
            bias = repeat_windows(bias, q.shape[0])
        dropout = self.attn_drop_rate if self.training else 0.0
        if torch.jit.is_tracing():
            # Exported, scaled_dot_product_attention would scale k as well and transpose k twice.
            logits = (q * self.qk_scale) @ k.transpose(-1, -2)
            return F.dropout((logits if bias is None else logits + bias).softmax(-1), dropout) @ v
        return F.scaled_dot_product_attention(q, k, v, bias, dropout, scale=self.qk_scale)

    def logit_bias(self, geometry: Geometry, dtype: torch.dtype) -> Tensor | None:
        """The addend B of the logits, (1, h, N, M) or, for nW windows of a map, (nW, h, N, M); or None."""
        return None


class WindowAttention(Attention):
    """Attention inside windows, with the state-dict keys of mmdet's WindowMSA. Subclasses write :meth:`mix`.

    Args:
        window_size: Side w of a window; N = w * w tokens.
        qkv_bias: Whether q, k and v have a bias.
        proj_drop_rate: Dropout after the output projection.
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
    ) -> None:
        super().__init__(embed_dims, num_heads, (window_size, window_size), qk_scale, attn_drop_rate)
        self.window_size = window_size
        self.qkv = nn.Linear(embed_dims, 3 * embed_dims, bias=qkv_bias)
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.proj_drop = nn.Dropout(proj_drop_rate)
        # The q, k and v of padding tokens, once a norm is folded into qkv; see keep_padding().
        self.register_buffer('padding_qkv', None)

    def padding_row(self) -> Tensor:
        """The q, k and v of a padding token, (3C,): the bias of qkv, because the token is zero."""
        if self.padding_qkv is not None:
            return self.padding_qkv
        return self.qkv.weight.new_zeros(len(self.qkv.weight)) if self.qkv.bias is None else self.qkv.bias

    def keep_padding(self) -> None:
        """Stores q, k and v of padding tokens; fusion calls it before it folds a norm into qkv."""
        # Padding tokens never passed the norm: they must keep the unfused bias.
        self.padding_qkv = self.padding_row().detach().clone()

    def keep_head_dims(self, head_dims: int, rows: Tensor) -> None:
        super().keep_head_dims(head_dims, rows)
        if self.padding_qkv is not None:
            self.padding_qkv = self.padding_qkv[rows]

    def input_layers(self) -> tuple[str]:
        return ('qkv',)

    def attend(self, x: Tensor, windows: Windows) -> Tensor:
        """Attends in every window, (B, L, C) -> (B, L, C), without the output projection."""
        return windows.merge(self.mix(*windows.cut(x, self), windows))


class SoftmaxWindowAttention(SoftmaxMixing, WindowAttention):
    """Softmax attention with relative position bias (Swin, Liu et al., ICCV 2021).

    B is the position bias of each pair of slots. Pairs from different regions of a shifted map get -100 in addition.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * self.window_size - 1) ** 2, self.num_heads))
        slots = torch.cartesian_prod(torch.arange(self.window_size), torch.arange(self.window_size))
        offset = slots[:, None] - slots[None] + self.window_size - 1
        # The row of the table for each pair of slots, (N, N).
        self.register_buffer('relative_position_index', offset[..., 0] * (2 * self.window_size - 1) + offset[..., 1])

    def logit_bias(self, geometry: Geometry, dtype: torch.dtype) -> Tensor:
        num_slots = self.window_size**2
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        bias = bias.view(1, num_slots, num_slots, -1).permute(0, 3, 1, 2).to(dtype)
        mask = geometry.attention_mask(dtype)
        return (bias if mask is None else bias + mask[:, None]).contiguous()

    def hidden_channels(self) -> Iterator[Channels]:
        """The channels of the heads. A subclass may mix them."""
        if type(self) is SoftmaxWindowAttention:
            yield Channels('', ('qkv',), ('proj',), heads=self.num_heads, tokens=(('qkv', 'input'),) * 2)


class ShiftedWindowAttention(BaseModule):
    """Attention in (shifted) windows of a feature map, with the state-dict keys of mmdet's ShiftWindowMSA.

    Padding slots of the windows hold q, k and v of a zero token.

    Args:
        w_msa: The attention inside a window.
        shift_size: Cyclic shift, in tokens.
        drop_path_rate: Stochastic depth.

    Shape:
        (B, H * W, C) -> (B, H * W, C).
    """

    # Name of the layer that writes the output.
    output_layer = 'w_msa.proj'

    def __init__(self, w_msa: WindowAttention, shift_size: int, drop_path_rate: float) -> None:
        super().__init__()
        self.w_msa = w_msa
        self.shift_size = shift_size
        self.drop = build_dropout(dict(type='DropPath', drop_prob=drop_path_rate))
        # (height, width, window_size, shift, device) -> the windows of a map.
        self.make_windows: Callable[[int, int, int, int, torch.device], Windows] = WindowGeometry

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor | None = None) -> Tensor:
        windows = self.make_windows(*hw_shape, self.w_msa.window_size, self.shift_size, x.device)
        out = self.drop(self.w_msa.proj_drop(self.w_msa.proj(self.w_msa.attend(x, windows))))
        return out if identity is None else identity + out

    def input_layers(self) -> tuple[str]:
        return ('w_msa',)


class MapAttention(Attention):
    """Attention over a map, with spatial reduction (PVT, Wang et al., ICCV 2021). Subclasses write :meth:`mix`.

    With ``sr_ratio`` r > 1 keys and values come from an r x r convolution of stride r and a norm. State-dict keys are
    as in mmdet's SpatialReductionAttention.

    Args:
        sr_ratio: Side r of the blocks that become one key and value.
        qkv_bias: Whether the projections to q, k and v and, as in mmdet, the output projection have a bias.
        proj_drop_rate: Dropout after the output projection.
        drop_path_rate: Stochastic depth.
        norm_cfg: The norm of the reduced map.

    Shape:
        (B, H * W, C) -> (B, H * W, C).
    """

    # Name of the layer that writes the output.
    output_layer = 'attn.out_proj'

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
        super().__init__(embed_dims, num_heads, table_shape, attn_drop_rate=attn_drop_rate)
        self.sr_ratio = sr_ratio
        # Holds the projections under mmdet's names; its own forward is not called.
        self.attn = nn.MultiheadAttention(embed_dims, num_heads, attn_drop_rate, bias=qkv_bias)
        self.proj_drop = nn.Dropout(proj_drop_rate)
        self.drop = build_dropout(dict(type='DropPath', drop_prob=drop_path_rate))
        if sr_ratio > 1:
            self.sr = nn.Conv2d(embed_dims, embed_dims, sr_ratio, sr_ratio)
            self.norm = build_norm_layer(norm_cfg, embed_dims)[1]

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor | None = None) -> Tensor:
        source, source_shape = self.reduce(x, hw_shape)
        to_q, to_kv = self.projections()
        q, k, v = F.linear(x, *to_q), *F.linear(source, *to_kv).chunk(2, dim=-1)
        q, k, v = (split_groups(part, self.groups) for part in (q, k, v))
        mixed = self.mix(q, k, v, MapGeometry(hw_shape, source_shape, self.sr_ratio > 1))
        out = self.drop(self.proj_drop(self.attn.out_proj(join_groups(mixed))))
        # As in mmdet, which adds the input where no identity is given.
        return (x if identity is None else identity) + out

    def projections(self) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """Weight and bias of the projection to q, and of the projection to k and v."""
        sizes = [self.num_heads * self.head_dims, 2 * self.num_heads * self.head_dims]
        biases = (None, None) if self.attn.in_proj_bias is None else self.attn.in_proj_bias.split(sizes)
        return tuple(zip(self.attn.in_proj_weight.split(sizes), biases, strict=True))

    def reduce(self, x: Tensor, hw_shape: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        """The tokens that keys and values come from, and the (H, W) of their map."""
        if self.sr_ratio == 1:
            return x, hw_shape
        image = self.sr(x.transpose(1, 2).unflatten(2, hw_shape))
        return self.norm(image.flatten(2).transpose(1, 2)), (image.shape[2], image.shape[3])

    def folds(self) -> Iterator[Fold]:
        yield Fold('norm', 'attn[kv]')

    def input_layers(self) -> tuple[str, ...]:
        # q comes from every token, k and v from the reduced map.
        return ('attn[q]', 'sr') if self.sr_ratio > 1 else ('attn[qkv]',)


class SoftmaxMapAttention(SoftmaxMixing, MapAttention):
    """Softmax attention over a map (PVT, Wang et al., ICCV 2021)."""

    def hidden_channels(self) -> Iterator[Channels]:
        """The channels of the heads. A subclass may mix them."""
        if type(self) is SoftmaxMapAttention:
            keys = ('norm', 'output') if self.sr_ratio > 1 else ('', 'input')
            yield Channels('', ('attn',), ('attn.out_proj',), heads=self.num_heads, tokens=(('', 'input'), keys))
