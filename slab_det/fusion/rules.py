"""Folding one affine map per channel into the linear layer before or after it. All sums run in float64."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from mmcv.cnn import Conv2d, Linear
from torch import Tensor, nn

from slab_det.fusion.interference import find_hooks

FoldableLayer: TypeAlias = nn.Linear | nn.Conv2d | nn.MultiheadAttention

# Exact types: a subclass, or a parametrization, may compute its weight. mmcv's only differ on empty inputs.
PLAIN_LAYERS = (nn.Linear, nn.Conv2d, Linear, Conv2d)
# Thirds of the rows of a packed in_proj: the first and the one after the last.
PARTS = {'q': (0, 1), 'k': (1, 2), 'v': (2, 3), 'kv': (1, 3), 'qkv': (0, 3)}


def find_obstacle(layer: nn.Module, side: Literal['input', 'output'], part: str = '') -> str:
    """Why no affine map on this side of the layer can become part of it; '' if one can.

    Args:
        layer: Any module.
        side: Whether the map stands before the layer or after it.
        part: For nn.MultiheadAttention the projections that read the map: 'q', 'k', 'v', 'kv' or 'qkv'.
    """
    hooks = find_hooks(layer)
    if hooks:
        return f'it has {hooks}'
    if type(layer) is nn.MultiheadAttention:
        if side == 'output' or part not in PARTS:
            return f'an affine map folds only into the inputs of an attention, named as one of {", ".join(PARTS)}'
        if layer.in_proj_weight is None:
            return 'its projections are not packed in one weight'
        return _find_computed(layer)
    if type(layer) not in PLAIN_LAYERS or part:
        return f'an affine map does not fold into {f"[{part}] of " if part else ""}a {type(layer).__name__}'
    if side == 'input' and isinstance(layer, nn.Conv2d) and (layer.groups != 1 or layer.padding != (0, 0)):
        # Its padding would have to be -shift / scale.
        return 'an affine map folds only into a convolution with groups=1 and padding=0'
    return _find_computed(layer)


@torch.no_grad()
def fold_into_input(layer: FoldableLayer, scale: Tensor, shift: Tensor, part: str = '') -> None:
    """Makes ``layer(x)`` what ``layer(scale * x + shift)`` was.

    ``W (s x + t) + b = (W s) x + (b + W t)``. A layer without bias gets one.

    Args:
        layer: A linear layer, a convolution that sees no padding, or an attention.
        scale: (C_in,), float64.
        shift: (C_in,), float64.
        part: For an attention the projections that read the map: 'q', 'k', 'v', 'kv' or 'qkv'.

    Raises:
        ValueError: If the layer cannot take the map; it is then unchanged.
    """
    _check(layer, 'input', part)
    weight, bias = (_rows(parameter, part) for parameter in _parameters(layer))
    if isinstance(layer, nn.Conv2d):
        scale, shift = scale[:, None, None], shift[:, None, None]
    bias.copy_(bias.double() + (weight.double() * shift).flatten(1).sum(1))
    weight.copy_(weight.double() * scale)


@torch.no_grad()
def fold_into_output(layer: nn.Linear | nn.Conv2d, scale: Tensor, shift: Tensor) -> None:
    """Makes ``layer(x)`` what ``scale * layer(x) + shift`` was.

    ``s (W x + b) + t = (s W) x + (s b + t)``: all of the bias is scaled, by alpha / sigma and by eta.

    Args:
        layer: A linear layer or any convolution.
        scale: (C_out,), float64.
        shift: (C_out,), float64.

    Raises:
        ValueError: If the layer cannot take the map; it is then unchanged.
    """
    _check(layer, 'output', '')
    weight, bias = _parameters(layer)
    per_row = scale.view(-1, *[1] * (weight.ndim - 1))
    weight.copy_(weight.double() * per_row)
    bias.copy_(bias.double() * scale + shift)


def _find_computed(layer: FoldableLayer) -> str:
    """Which of weight and bias is no parameter, as torch.nn.utils.weight_norm leaves it; '' if both are."""
    for name in _parameter_names(layer):
        if name not in layer._parameters:
            return f'its {name} is no parameter: something computes it'
    return ''


def _check(layer: nn.Module, side: Literal['input', 'output'], part: str) -> None:
    obstacle = find_obstacle(layer, side, part)
    if obstacle:
        raise ValueError(obstacle)


def _parameters(layer: FoldableLayer) -> tuple[nn.Parameter, nn.Parameter]:
    """Weight and bias; a layer without bias gets one of zeros."""
    weight_name, bias_name = _parameter_names(layer)
    weight = getattr(layer, weight_name)
    if getattr(layer, bias_name) is None:
        zeros = weight.new_zeros(weight.shape[0])
        setattr(layer, bias_name, nn.Parameter(zeros, requires_grad=weight.requires_grad))
    return weight, getattr(layer, bias_name)


def _parameter_names(layer: FoldableLayer) -> tuple[str, str]:
    prefix = 'in_proj_' if isinstance(layer, nn.MultiheadAttention) else ''
    return f'{prefix}weight', f'{prefix}bias'


def _rows(parameter: nn.Parameter, part: str) -> Tensor:
    """The rows that belong to a part of an attention's projections, as a view; all of any other layer's."""
    if not part:
        return parameter
    first, end = PARTS[part]
    third = parameter.shape[0] // 3
    return parameter[first * third : end * third]
