"""The layers of all backbones: block, FFN, positions and patch merging.

``folds()`` says which layers take the norms at inference, ``writes()`` which layers write the residual stream; see
:mod:`slab_det.norms.folds`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as cp
from mmcv.cnn import build_activation_layer, build_norm_layer
from mmcv.cnn.bricks.transformer import build_dropout
from mmengine.model import BaseModule, Sequential
from torch import Tensor, nn

from slab_det.attention import MapAttention, ShiftedWindowAttention
from slab_det.attention.geometry import resize_table
from slab_det.backbones.arguments import check_whole
from slab_det.common.modules import as_class
from slab_det.norms import ChannelAffine
from slab_det.norms.folds import CannotFold, Channels, Fold, Write


class LinearFFN(BaseModule):
    """``fc2(act(fc1(x)))``, optionally with a norm next to the activation (BN+FFNBN, Yao et al., ICCVW 2021).

    State-dict keys are as in mmcv's FFN.

    Args:
        embed_dims: Channels C.
        feedforward_channels: Hidden channels.
        act_cfg: The activation.
        drop_rate: Dropout after the activation and after the second layer.
        drop_path_rate: Stochastic depth.
        ffn_norm: Where the norm stands: 'pre_act', between fc1 and the activation, or 'post_act', before fc2.
        norm_cfg: The norm.

    Shape:
        (B, H * W, C) -> (B, H * W, C).

    Raises:
        ValueError: If ``ffn_norm`` is unknown, or there are no hidden channels.
    """

    # Names of the layers.
    fc1, activation, fc2 = 'layers.0.0', 'layers.0.1', 'layers.1'

    def __init__(
        self,
        embed_dims: int,
        feedforward_channels: int,
        act_cfg: dict,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        ffn_norm: str | None = None,
        norm_cfg: dict = dict(type='LN'),  # noqa: B006
    ) -> None:
        super().__init__()
        if ffn_norm not in (None, 'pre_act', 'post_act'):
            raise ValueError(f"unknown ffn_norm {ffn_norm!r}: choose from None, 'pre_act' and 'post_act'")
        check_whole('feedforward_channels', feedforward_channels)
        self.embed_dims = embed_dims
        self.ffn_norm = ffn_norm
        self.layers = self.build_layers(
            embed_dims, feedforward_channels, build_activation_layer(act_cfg), nn.Dropout(drop_rate)
        )
        self.norm = build_norm_layer(norm_cfg, feedforward_channels)[1] if ffn_norm else nn.Identity()
        self.drop_path = build_dropout(dict(type='DropPath', drop_prob=drop_path_rate))

    def build_layers(self, channels: int, hidden: int, activation: nn.Module, drop: nn.Dropout) -> Sequential:
        """Builds the layers, in the order of their keys."""
        return Sequential(Sequential(nn.Linear(channels, hidden), activation, drop), nn.Linear(hidden, channels), drop)

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor) -> Tensor:
        """Returns ``identity`` plus the FFN of ``x``, the tokens of a map of (H, W)."""
        return identity + self.drop_path(self.transform(x, hw_shape))

    def transform(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """``fc2(act(fc1(x)))`` with dropout."""
        (fc1, activation, _), fc2, drop = self.layers
        return drop(fc2(drop(self.activate(fc1(x), activation))))

    def activate(self, hidden: Tensor, activation: nn.Module) -> Tensor:
        """Applies the activation and the norm to the hidden channels."""
        if self.ffn_norm == 'pre_act':
            return activation(self.norm(hidden))
        # The norm comes before the dropout: dropout would raise the variance that inference uses.
        return self.norm(activation(hidden))

    def folds(self) -> Iterator[Fold]:
        if self.ffn_norm:
            yield Fold('norm', after=self.fc1) if self.ffn_norm == 'pre_act' else Fold('norm', before=self.fc2)

    def input_layers(self) -> tuple[str]:
        return (self.fc1,)

    def writes(self) -> Iterator[Write]:
        yield Write(self.fc2)

    def hidden_channels(self) -> Iterator[Channels]:
        """The hidden channels, for :func:`slab_det.absorb`; CannotFold if a norm stands between the layers."""
        if not isinstance(self.norm, nn.Identity):
            raise CannotFold('a norm stands between its layers')
        (write,) = self.writes()
        yield Channels('', (self.fc1,), (write.layer,), self.between())

    def between(self) -> tuple[str, ...]:
        """Names of the layers between fc1 and fc2, without norm and dropout."""
        return (self.activation,)


class ConvFFN(LinearFFN):
    """An FFN of two 1x1 convolutions, which run as linear layers. State-dict keys are as in mmdet's MixFFN.

    Args:
        use_conv: Put a depthwise 3x3 convolution before the activation (PVTv2, Wang et al., CVMJ 2022).
    """

    # Names of the layers without the depthwise convolution.
    fc1, activation, fc2 = 'layers.0', 'layers.1', 'layers.3'

    def __init__(self, *args, use_conv: bool = False, **kwargs) -> None:
        self.use_conv = use_conv
        super().__init__(*args, **kwargs)
        if use_conv and self.ffn_norm:
            # A norm before the convolution would meet its padding, and no paper has one behind it.
            raise ValueError(f'ffn_norm={self.ffn_norm!r} is defined for an FFN of two layers: set use_conv_ffn=False')

    def build_layers(self, channels: int, hidden: int, activation: nn.Module, drop: nn.Dropout) -> Sequential:
        fc1 = nn.Conv2d(channels, hidden, 1)
        depthwise = [nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden)] if self.use_conv else []
        return Sequential(fc1, *depthwise, activation, drop, nn.Conv2d(hidden, channels, 1), drop)

    def transform(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        fc1, *depthwise, activation, drop, fc2, _ = self.layers
        hidden = F.linear(x, fc1.weight.flatten(1), fc1.bias)
        for conv in depthwise:
            hidden = conv(hidden.transpose(1, 2).unflatten(2, hw_shape)).flatten(2).transpose(1, 2)
        hidden = drop(self.activate(hidden, activation))
        return drop(F.linear(hidden, fc2.weight.flatten(1), fc2.bias))

    def writes(self) -> Iterator[Write]:
        # fc2 is never called as a module. It reads the output of the dropout, which is also the last module.
        last = len(self.layers) - 1
        yield Write(f'layers.{last - 1}', source=f'layers.{last}')

    def between(self) -> tuple[str, ...]:
        return ('layers.1', 'layers.2') if self.use_conv else super().between()


class Block(BaseModule):
    """``x + attn(norm1(x))``, then ``x + ffn(norm2(x))``.

    Args:
        attn: The attention.
        ffn: The FFN.
        norm_cfg: The type of both norms.
        with_cp: Recompute activations in the backward pass instead of keeping them.

    Shape:
        (B, H * W, C) -> (B, H * W, C).
    """

    def __init__(
        self, attn: ShiftedWindowAttention | MapAttention, ffn: LinearFFN, norm_cfg: dict, with_cp: bool = False
    ) -> None:
        super().__init__()
        self.with_cp = with_cp
        self.norm1 = build_norm_layer(norm_cfg, ffn.embed_dims)[1]
        self.attn = attn
        self.norm2 = build_norm_layer(norm_cfg, ffn.embed_dims)[1]
        self.ffn = ffn

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        if self.with_cp and x.requires_grad:
            return cp.checkpoint(self._forward, x, hw_shape, use_reentrant=False)
        return self._forward(x, hw_shape)

    def _forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        x = self.attn(self.norm1(x), hw_shape, x)
        return self.ffn(self.norm2(x), hw_shape, x)

    def folds(self) -> Iterator[Fold]:
        """Which layers take the norms at inference; see :class:`slab_det.fusion.Fold`."""
        yield Fold('norm1', before='attn')
        yield Fold('norm2', before='ffn')

    def writes(self) -> Iterator[Write]:
        """The layers that write the residual stream; see :class:`slab_det.fusion.Write`."""
        yield Write(f'attn.{self.attn.output_layer}', 'norm2')
        for write in self.ffn.writes():
            yield Write(f'ffn.{write.layer}', source=write.source and f'ffn.{write.source}')


class PositionEmbedding(BaseModule):
    """Adds a learned embedding of (H, W) positions, interpolated to the size of the map, to tokens (B, H * W, C)."""

    def __init__(self, pos_shape: tuple[int, int], embed_dims: int, drop_rate: float) -> None:
        super().__init__()
        self.pos_shape = pos_shape
        self.pos_embed = nn.Parameter(torch.zeros(1, pos_shape[0] * pos_shape[1], embed_dims))
        self.drop = nn.Dropout(drop_rate)

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        return self.drop(x + resize_table(self.pos_embed, self.pos_shape, hw_shape))


class PatchMerging(BaseModule):
    """Merges s x s blocks of tokens into one token each: a norm and a linear reduction.

    Args:
        in_channels: Channels C of a token.
        out_channels: Channels of a merged token.
        stride: Side s of a block.
        norm_cfg: Norm over the s * s * C channels of a block; None for none.

    Shape:
        (B, H * W, C) -> (B, ceil(H / s) * ceil(W / s), C_out). Odd sides are padded with zeros before the norm.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 2, norm_cfg: dict | None = None) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.stride = stride
        block_channels = stride * stride * in_channels
        self.norm = build_norm_layer(norm_cfg, block_channels)[1] if norm_cfg else None
        self.reduction = nn.Linear(block_channels, out_channels, bias=False)

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        """Merges a map and returns it with its new (H, W)."""
        blocks, hw_shape = self.cut_blocks(x, hw_shape)
        # mmdet's order of channels, (C, row, column). A single copy, straight into this order, takes 3 times as long.
        x = blocks.transpose(2, 3).flatten(2)
        return self.reduction(x if self.norm is None else self.norm(x)), hw_shape

    def cut_blocks(self, x: Tensor, hw_shape: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        """Cuts a map into blocks (B, H' * W', s * s, C); returns them and (H', W')."""
        stride, (height, width) = self.stride, hw_shape
        x = x.unflatten(1, hw_shape)
        padding = (0, 0, 0, -width % stride, 0, -height % stride)
        # A trace pads always: it serves sizes that the stride does not divide too.
        if torch.jit.is_tracing() or any(padding):
            x = F.pad(x, padding)
        # (B, H', s, W', s, C) -> (B, H', W', s, s, C)
        x = x.unflatten(2, (-1, stride)).unflatten(1, (-1, stride)).transpose(2, 3)
        return x.flatten(3, 4).flatten(1, 2), (x.shape[1], x.shape[2])

    def folds(self) -> Iterator[Fold]:
        # Exact for odd maps too: their padding passes the norm, as every token does.
        yield Fold('norm', before='reduction')


class DeployedPatchMerging(PatchMerging):
    """Patch merging with weights in the order (row, column, C) of the tokens, so that no token is transposed."""

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        blocks, hw_shape = self.cut_blocks(x, hw_shape)
        x = blocks.flatten(2)
        return self.reduction(x if self.norm is None else self.norm(x)), hw_shape


def deployed_merging(layer: nn.Module) -> DeployedPatchMerging | None:
    """The deployed form of a patch merging, whose weights are permuted in place.

    None for every other layer, and for a merging with a norm of its own.
    """
    known_norms = nn.LayerNorm, ChannelAffine, nn.Identity, type(None)
    if type(layer) is not PatchMerging or type(layer.norm) not in known_norms:
        return None
    for parameter in (layer.reduction.weight, *(layer.norm.parameters() if layer.norm else ())):
        blocks = parameter.data.unflatten(-1, (layer.in_channels, layer.stride, layer.stride))
        parameter.data = blocks.movedim(-3, -1).flatten(-3)
    return as_class(layer, DeployedPatchMerging)
