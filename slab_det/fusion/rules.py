"""Folding one affine map per channel into the linear layer before or after it. All sums run in float64."""
from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor, nn

FoldableLayer: TypeAlias = nn.Linear | nn.Conv2d


@torch.no_grad()
def fold_into_input(layer: FoldableLayer, scale: Tensor, shift: Tensor) -> None:
    """Makes ``layer(x)`` what ``layer(scale * x + shift)`` was.

    ``W (s x + t) + b = (W s) x + (b + W t)``. A layer without bias gets one.

    Args:
        layer: A linear layer, or a convolution that sees no padding.
        scale: (C_in,), float64.
        shift: (C_in,), float64.

    Raises:
        ValueError: If the convolution is padded or grouped: its padding would have to be ``-shift / scale``.
    """
    weight = layer.weight.double()
    if isinstance(layer, nn.Conv2d):
        if layer.groups != 1 or any(layer.padding):
            raise ValueError('an affine map folds only into a convolution with groups=1 and padding=0')
        scale, shift = scale[:, None, None], shift[:, None, None]
    _write(layer, weight * scale, _bias(layer) + (weight * shift).flatten(1).sum(1))


@torch.no_grad()
def fold_into_output(layer: FoldableLayer, scale: Tensor, shift: Tensor) -> None:
    """Makes ``layer(x)`` what ``scale * layer(x) + shift`` was.

    ``s (W x + b) + t = (s W) x + (s b + t)``: all of the bias is scaled, by alpha / sigma and by eta.

    Args:
        layer: A linear layer or any convolution.
        scale: (C_out,), float64.
        shift: (C_out,), float64.
    """
    per_row = scale.view(-1, *[1] * (layer.weight.ndim - 1))
    _write(layer, layer.weight.double() * per_row, _bias(layer) * scale + shift)


def _bias(layer: FoldableLayer) -> Tensor:
    if layer.bias is None:
        return layer.weight.new_zeros(layer.weight.shape[0], dtype=torch.float64)
    return layer.bias.double()


def _write(layer: FoldableLayer, weight: Tensor, bias: Tensor) -> None:
    layer.weight.copy_(weight)
    if layer.bias is None:
        layer.bias = nn.Parameter(layer.weight.new_empty(bias.shape), requires_grad=layer.weight.requires_grad)
    layer.bias.copy_(bias)
