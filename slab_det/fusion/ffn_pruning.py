"""Removes hidden channels from FFNs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slab_det.fusion.affine import check_foldable
from slab_det.norms.folds import CannotFold, find_hooks, find_rule

# Activations that act on each hidden channel alone, so that channels can be removed.
ELEMENTWISE = (nn.GELU, nn.ReLU, nn.SiLU, nn.Hardswish)


def find_ffn_layers(ffn: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """Returns fc1, the activation and fc2 of an FFN, where fc1 and fc2 are linear layers or 1x1 convolutions.

    Raises:
        CannotFold: If the FFN has another structure; the message says which.
    """
    rule = find_rule(ffn, 'ffn_layers')
    if rule is None:
        raise CannotFold(f'a {type(ffn).__name__} does not say which layers it has')
    fc1, activation, fc2 = map(ffn.get_submodule, rule())
    if type(activation) not in ELEMENTWISE:
        raise CannotFold(f'its activation is a {type(activation).__name__}')
    for layer in (fc1, fc2):
        check_foldable(layer, 'input')
        if isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1):
            raise CannotFold('its convolutions are larger than 1x1')
        if layer.bias is None:
            raise CannotFold('its layers have no bias')
    if any(map(find_hooks, ffn.modules())):
        raise CannotFold('it has hooks, which may expect all channels')
    return fc1, activation, fc2


@torch.no_grad()
def prune_ffn(ffn: nn.Module, channels: Tensor) -> None:
    """Removes hidden channels from an FFN, in place.

    Args:
        ffn: The FFN.
        channels: Indices of the hidden channels that stay, (K,).

    Raises:
        CannotFold: See :func:`find_ffn_layers`.
        IndexError: If an index is out of range.
    """
    fc1, _, fc2 = find_ffn_layers(ffn)
    channels = channels.to(fc1.weight.device)
    fc1.weight, fc1.bias = nn.Parameter(fc1.weight[channels]), nn.Parameter(fc1.bias[channels])
    fc2.weight = nn.Parameter(fc2.weight[:, channels])
    for layer, linear, conv in ((fc1, 'out_features', 'out_channels'), (fc2, 'in_features', 'in_channels')):
        setattr(layer, conv if isinstance(layer, nn.Conv2d) else linear, len(channels))
