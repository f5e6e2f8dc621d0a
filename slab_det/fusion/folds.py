"""Where norms can go: registries of functions, one per kind of module, that name the layers for each norm."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
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
SUBCLASS_FOLD_RULES: dict[type[nn.Module], FoldRule] = {}


def folds_of(*module_types: type[nn.Module]) -> Callable[[FoldRule], FoldRule]:
    """Registers a function that yields the folds inside a module of one of these exact types.

    Exact, because a subclass may read a norm's output in another place.
    """

    def register(rule: FoldRule) -> FoldRule:
        FOLD_RULES.update(dict.fromkeys(module_types, rule))
        return rule

    return register


def folds_of_subclasses(*module_types: type[nn.Module]) -> Callable[[FoldRule], FoldRule]:
    """As :func:`folds_of`, for subclasses too: the rule looks itself at what they override."""

    def register(rule: FoldRule) -> FoldRule:
        SUBCLASS_FOLD_RULES.update(dict.fromkeys(module_types, rule))
        return rule

    return register


def find_folds(module: nn.Module) -> Iterator[Fold]:
    """The folds inside a module; none if no rule is for it."""
    rule = FOLD_RULES.get(type(module))
    if rule is None:
        rule = next((rule for kind, rule in SUBCLASS_FOLD_RULES.items() if isinstance(module, kind)), None)
    return iter(()) if rule is None else rule(module)


def find_unknown(name: str, module: nn.Module, known: Collection[type[nn.Module]]) -> str:
    """Why nothing can be said about what reads the input of the module called ``name``; '' if its type is known."""
    if type(module) in known:
        return ''
    return f'{name} is a {type(module).__name__}, which no rule knows: it may do more to its input'


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
