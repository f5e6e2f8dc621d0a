"""Where norms can go: a registry of functions, one per kind of module, that name the layer for each norm."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn


@dataclass(frozen=True)
class Fold:
    """One norm and the layer that takes it.

    Attributes:
        norm: Dotted name of the norm, relative to the module that the rule is for.
        layer: Dotted name of the linear layer or convolution.
        side: The norm stands before the layer ('input') or after it ('output').
        prepare: Called before the layer changes.
        obstacle: Why this norm must not be folded; the empty string if it may.
    """

    norm: str
    layer: str
    side: Literal['input', 'output'] = 'input'
    prepare: Callable[[], None] | None = None
    obstacle: str = ''


FoldRule = Callable[[nn.Module], Iterator[Fold]]
FOLD_RULES: dict[type[nn.Module], FoldRule] = {}


def folds_of(*module_types: type[nn.Module]) -> Callable[[FoldRule], FoldRule]:
    """Registers a function that yields the folds inside a module of one of these exact types.

    Exact, because a subclass may read a norm's output in another place.
    """
    def register(rule: FoldRule) -> FoldRule:
        FOLD_RULES.update(dict.fromkeys(module_types, rule))
        return rule
    return register
