"""The FFN of PVT, on tokens; with a depthwise convolution (PVTv2) or with one more norm (BN+FFNBN)."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from mmcv.cnn import build_activation_layer, build_norm_layer
from mmcv.cnn.bricks.transformer import build_dropout
from mmengine.model import BaseModule, Sequential
from torch import Tensor, nn

from slab_det.fusion import Fold


class MapFFN(BaseModule):
    """Two 1x1 convolutions and an activation between them.

    State-dict keys are those of mmdet's MixFFN. The 1x1 convolutions run as linear layers on the tokens, which need
    not be laid out as a map for them.

    Args:
        embed_dims: Channels C.
        feedforward_channels: Hidden channels.
        act_cfg: The activation.
        drop_rate: Dropout after the activation and after the second layer.
        drop_path_rate: Stochastic depth.
        use_conv: Put a depthwise 3x3 convolution before the activation (PVTv2, Wang et al., CVMJ 2022).

    Shape:
        (B, H * W, C) -> (B, H * W, C).
    """

    def __init__(
        self,
        embed_dims: int,
        feedforward_channels: int,
        act_cfg: dict,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        use_conv: bool = False,
    ) -> None:
        super().__init__()
        fc1 = nn.Conv2d(embed_dims, feedforward_channels, 1)
        depthwise = (
            [nn.Conv2d(feedforward_channels, feedforward_channels, 3, padding=1, groups=feedforward_channels)]
            if use_conv
            else []
        )
        fc2 = nn.Conv2d(feedforward_channels, embed_dims, 1)
        drop = nn.Dropout(drop_rate)
        self.layers = Sequential(fc1, *depthwise, build_activation_layer(act_cfg), drop, fc2, drop)
        self.drop = build_dropout(dict(type='DropPath', drop_prob=drop_path_rate))

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor | None = None) -> Tensor:
        """The FFN of the tokens of a map of (H, W), plus ``identity`` where it is given."""
        fc1, *between, drop, fc2, _ = self.layers
        x = F.linear(x, fc1.weight.flatten(1), fc1.bias)
        x = drop(self.activate(x, between, hw_shape))
        out = self.drop(drop(F.linear(x, fc2.weight.flatten(1), fc2.bias)))
        return out if identity is None else identity + out

    def activate(self, hidden: Tensor, between: list[nn.Module], hw_shape: tuple[int, int]) -> Tensor:
        """What happens to the hidden channels (B, H * W, C'): ``between``, the modules from fc1 to the dropout."""
        *depthwise, activation = between
        for conv in depthwise:
            hidden = conv(hidden.transpose(1, 2).unflatten(2, hw_shape)).flatten(2).transpose(1, 2)
        return activation(hidden)

    def input_layers(self) -> tuple[str]:
        """The layer that reads the input: the padding of a depthwise convolution comes behind it."""
        return ('layers.0',)


class NormedMapFFN(MapFFN):
    """A MapFFN with a norm over its hidden channels (BN+FFNBN, Yao et al., ICCVW 2021).

    Subclasses say on which side of the activation the norm stands.

    Args:
        norm_cfg: The norm.
    """

    def __init__(self, embed_dims: int, feedforward_channels: int, *args, norm_cfg: dict, **kwargs) -> None:
        super().__init__(embed_dims, feedforward_channels, *args, **kwargs)
        self.norm = build_norm_layer(norm_cfg, feedforward_channels)[1]


class PreActMapFFN(NormedMapFFN):
    """``fc2(act(norm(fc1(x))))``: at inference the norm is part of fc1."""

    def activate(self, hidden: Tensor, between: list[nn.Module], hw_shape: tuple[int, int]) -> Tensor:
        return super().activate(self.norm(hidden), between, hw_shape)

    def folds(self) -> Iterator[Fold]:
        yield Fold('norm', after='layers.0')

    # The norm stands between the layers: the input is read as without it.
    input_layers = MapFFN.input_layers


class PostActMapFFN(NormedMapFFN):
    """``fc2(norm(act(fc1(x))))``: at inference the norm is part of fc2."""

    def activate(self, hidden: Tensor, between: list[nn.Module], hw_shape: tuple[int, int]) -> Tensor:
        # Before the dropout, whose noise would widen the statistics that inference uses.
        return self.norm(super().activate(hidden, between, hw_shape))

    def folds(self) -> Iterator[Fold]:
        yield Fold('norm', before='layers.3')

    # The norm stands between the layers: the input is read as without it.
    input_layers = MapFFN.input_layers


NORMED_MAP_FFNS: dict[str, type[NormedMapFFN]] = {'pre_act': PreActMapFFN, 'post_act': PostActMapFFN}


def build_map_ffn(ffn_norm: str | None, norm_cfg: dict, use_conv: bool, **options) -> MapFFN:
    """The FFN of a block.

    Args:
        ffn_norm: Where an additional norm stands, 'pre_act' or 'post_act'; None for none.
        norm_cfg: The additional norm.
        use_conv: Put a depthwise convolution before the activation.
        **options: Other arguments of :class:`MapFFN`.

    Raises:
        ValueError: If ``ffn_norm`` is unknown, or given together with ``use_conv``.
    """
    if ffn_norm is None:
        return MapFFN(use_conv=use_conv, **options)
    if ffn_norm not in NORMED_MAP_FFNS:
        raise ValueError(f'unknown ffn_norm {ffn_norm!r}: choose from {[None, *NORMED_MAP_FFNS]}')
    if use_conv:
        # A norm before the convolution would meet its padding, and no paper has one behind it.
        raise ValueError(f'ffn_norm={ffn_norm!r} is defined for an FFN of two layers: set use_conv_ffn=False')
    return NORMED_MAP_FFNS[ffn_norm](norm_cfg=norm_cfg, **options)
