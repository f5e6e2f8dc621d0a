"""Recognises the layers that deploy can replace, and replaces them."""

from __future__ import annotations

from collections.abc import Callable

from mmcv.cnn import Linear
from torch import nn

from slab_det.norms.folds import find_hooks


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
