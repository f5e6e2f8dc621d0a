"""Recognises the layers that deploy can replace, and replaces them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from mmcv.cnn import Linear
from torch import nn

from slab_det.backbones.blocks import ConvFFN, LinearFFN
from slab_det.fusion.channels import find_channels
from slab_det.norms.folds import find_hooks

ACTIVATIONS = {nn.GELU: 'gelu', nn.ReLU: 'relu'}


class FFNLayers(NamedTuple):
    """The layers of an FFN, ``fc2(act(fc1(x)))``.

    Attributes:
        fc1: First layer, linear or a 1x1 convolution.
        activation: 'gelu' or 'relu'.
        fc2: Second layer.
    """

    fc1: nn.Module
    activation: str
    fc2: nn.Module


def known_ffn(ffn: nn.Module) -> FFNLayers | None:
    """The layers of an FFN; None if it has other layers too, such as a convolution or a norm."""
    if type(ffn) not in (LinearFFN, ConvFFN):
        return None
    place = find_channels(ffn)['']
    if place.reason or len(place.between) > 1:
        return None
    fc1, activation, fc2 = map(ffn.get_submodule, (*place.writers, *place.between, *place.readers))
    if fc1.bias is None or type(activation) not in ACTIVATIONS or getattr(activation, 'approximate', 'none') != 'none':
        return None
    return FFNLayers(fc1, ACTIVATIONS[type(activation)], fc2)


def is_plain_linear(layer: nn.Module) -> bool:
    """Whether ``layer`` computes ``x weight^T + bias`` and nothing else."""
    # Exact classes: a subclass may compute its weight, or add something.
    return type(layer) in (nn.Linear, Linear) and 'weight' in layer._parameters


def replace_layers(module: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> None:
    """Replaces each submodule by the layer that ``replacement`` returns, in place; None keeps the submodule.

    A layer with hooks stays: its replacement would not call them.
    """
    for name, child in module.named_children():
        new = None if any(map(find_hooks, child.modules())) else replacement(child)
        if new is None:
            replace_layers(child, replacement)
        else:
            setattr(module, name, new.train(child.training))
