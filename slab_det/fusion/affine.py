"""Folds an affine map into the linear layer before or behind it, in float64."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn

from slab_det.norms.folds import CONV, LINEAR, CannotFold

Side: TypeAlias = Literal['input', 'output']

FOLDABLE_LAYERS = (*LINEAR, *CONV, nn.MultiheadAttention)
# A packed in_proj has three thirds: q, k and v. For each part: its first third, and the third that follows the part.
THIRDS = {'q': (0, 1), 'k': (1, 2), 'v': (2, 3), 'kv': (1, 3), 'qkv': (0, 3)}


def check_foldable(layer: nn.Module, side: Side, part: str = '', name: str = 'layer') -> None:
    """Raises CannotFold unless the layer, or the named part of it, can take an affine map on this side."""
    kind = type(layer)
    is_attention = kind is nn.MultiheadAttention
    if kind not in FOLDABLE_LAYERS or (part and not is_attention):
        raise CannotFold(f'{name}: an affine map does not fold into {"a part of " if part else ""}a {kind.__name__}')
    if is_attention and (side == 'output' or part not in THIRDS or layer.in_proj_weight is None):
        raise CannotFold(f'{name}: an affine map folds only into packed inputs {", ".join(THIRDS)} of an attention')
    if side == 'input' and isinstance(layer, nn.Conv2d) and (layer.groups != 1 or layer.padding != (0, 0)):
        # A fold would need padding with -shift / scale instead of zeros.
        raise CannotFold(f'{name}: an affine map folds only into a convolution with groups=1 and padding=0')
    # torch.nn.utils.weight_norm makes the weight a plain attribute.
    if not {*_parameter_names(layer)} <= layer._parameters.keys():
        raise CannotFold(f'{name}: its weight is no parameter but computed')


@torch.no_grad()
def fold_into_input(layer: nn.Module, scale: Tensor, shift: Tensor, part: str = '') -> None:
    """Changes a layer so that ``layer(x)`` returns what ``layer(scale * x + shift)`` returned before.

    ``W (s x + t) + b = (W s) x + (b + W t)``. A layer without bias gets one.

    Args:
        layer: A linear layer, a convolution without padding, or an attention.
        scale: (C_in,), or a matrix (C_in, C_in) that maps ``x``.
        shift: (C_in,).
        part: For an attention, the projections to change: 'q', 'k', 'v', 'kv' or 'qkv'.

    Raises:
        CannotFold: If the layer cannot take the map; the layer is then unchanged.
    """
    check_foldable(layer, 'input', part)
    weight, bias = _parameters(layer, part)
    # Moves the input channels behind the kernel positions of a convolution.
    columns = weight.double().movedim(1, -1)
    bias.copy_(bias.double() + (columns * shift.double()).flatten(1).sum(1))
    columns = columns @ scale.double() if scale.ndim == 2 else columns * scale.double()
    weight.copy_(columns.movedim(-1, 1))


@torch.no_grad()
def fold_into_output(layer: nn.Linear | nn.Conv2d, scale: Tensor, shift: Tensor) -> None:
    """Changes a layer so that ``layer(x)`` returns what ``scale * layer(x) + shift`` returned before.

    ``s (W x + b) + t = (s W) x + (s b + t)``: the whole bias is scaled, for RepBN by alpha / sigma + eta.

    Args:
        layer: A linear layer or any convolution.
        scale: (C_out,), or a matrix (C_out, C_out) that maps ``layer(x)``.
        shift: (C_out,).

    Raises:
        CannotFold: If the layer cannot take the map; the layer is then unchanged.
    """
    check_foldable(layer, 'output')
    weight, bias = _parameters(layer)
    scale = scale.double() if scale.ndim == 2 else scale.double().diag()
    weight.copy_((scale @ weight.double().flatten(1)).view_as(weight))
    bias.copy_(scale @ bias.double() + shift.double())


def _parameter_names(layer: nn.Module) -> tuple[str, str]:
    return ('in_proj_weight', 'in_proj_bias') if isinstance(layer, nn.MultiheadAttention) else ('weight', 'bias')


def _parameters(layer: nn.Module, part: str = '') -> tuple[Tensor, Tensor]:
    """Weight and bias, or for a part of an attention views of their rows; adds a bias of zeros where there is none."""
    weight_name, bias_name = _parameter_names(layer)
    weight = getattr(layer, weight_name)
    if getattr(layer, bias_name) is None:
        zeros = weight.new_zeros(weight.shape[0])
        setattr(layer, bias_name, nn.Parameter(zeros, requires_grad=weight.requires_grad))
        if isinstance(layer, nn.MultiheadAttention):
            # The fused kernel of the attention needs both biases or none.
            _parameters(layer.out_proj)
    parameters = weight, getattr(layer, bias_name)
    if not part:
        return parameters
    first, end = THIRDS[part]
    third = weight.shape[0] // 3
    return tuple(parameter[first * third : end * third] for parameter in parameters)
