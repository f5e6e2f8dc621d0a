"""Where norms can go: registries of functions, one per kind of module, that name the layers for each norm."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from torch import nn


@dataclass(frozen=True)
class Fold:
    """One norm and the layers that take it: all that read it, or the one that it reads.

    Attributes:
        norm: Dotted name of the norm, relative to the module that the rule is for.
        layer: Dotted name of the linear layer or convolution, or a tuple of names. Of an nn.MultiheadAttention some
            of the packed projections are named in brackets: 'attn[q]', 'attn[kv]', 'attn[qkv]'.
        side: The norm stands before the layers ('input') or after the layer ('output').
        prepare: Called before a layer changes.
        obstacle: Why this norm must not be folded; the empty string if it may.
    """

    norm: str
    layer: str | tuple[str, ...]
    side: Literal['input', 'output'] = 'input'
    prepare: Callable[[], None] | None = None
    obstacle: str = ''

    @property
    def targets(self) -> tuple[str, ...]:
        """``layer`` as a tuple."""
        return (self.layer,) if isinstance(self.layer, str) else self.layer


def split_part(target: str) -> tuple[str, str]:
    """``'attn[kv]'`` is the part 'kv' of 'attn'; a name without brackets has the part ''."""
    layer, _, part = target.removesuffix(']').partition('[')
    return layer, part


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


OutputNormRule = Callable[[nn.Module, int], Fold]
OUTPUT_NORM_RULES: dict[type[nn.Module], OutputNormRule] = {}


def output_norm_of(*backbone_types: type[nn.Module]) -> Callable[[OutputNormRule], OutputNormRule]:
    """Registers a function that says, for backbones of these exact types, what happens after a stage.

    Its fold names the norm that an output of the backbone has passed, and the layers inside the backbone that read
    that output too, perhaps none.
    """
    def register(rule: OutputNormRule) -> OutputNormRule:
        OUTPUT_NORM_RULES.update(dict.fromkeys(backbone_types, rule))
        return rule
    return register
