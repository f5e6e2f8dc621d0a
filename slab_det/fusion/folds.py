"""Fold rules: modules say which layers take their norms, and :func:`register_folds` says it for foreign classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from torch import nn

from slab_det.runtime.errors import SlabDetError


class CannotFold(SlabDetError):  # noqa: N818 (it ends no program: fuse leaves the norm as one multiply-add)
    """A norm cannot be folded into its neighbours; the message says why."""


class Fold(NamedTuple):
    """One norm and the layers that can take it: all that read it, or the one that it reads.

    A method ``folds()`` yields one Fold, or the same values as a plain tuple, for every norm that the module owns.

    Attributes:
        norm: Dotted name of the norm, relative to the module.
        before: Name of the module that reads the norm, or names of all modules that do. Where such a module is no plain
            layer, its ``input_layers()`` says which layers read its input. A part of a module stands in brackets:
            'attn[kv]' are the packed projections of k and v of an nn.MultiheadAttention.
        after: Name of the layer that takes the norm and whose output nothing but the norm reads.
    """

    norm: str
    before: str | tuple[str, ...] = ()
    after: str = ''


class Write(NamedTuple):
    """One layer that adds to the residual stream of a module, as a method ``writes()`` yields it.

    Names are dotted and relative to the module. The input of the layer and the new stream have the same tokens in the
    same order, channels last. The child that holds a layer with a ``stream``, such as an attention, affects what
    follows only by what it returns: absorption does not run it again. A neck has no residual stream: there each
    convolution is its own ``stream``.

    Attributes:
        layer: The linear layer that writes: an nn.Linear or an nn.Conv2d of kernel 1, or any nn.Conv2d in a neck.
        stream: The norm whose input is the new stream; '' where the module returns it.
        source: The module whose output the layer reads, at its first call; '' where the layer itself is called with it.
    """

    layer: str
    stream: str = ''
    source: str = ''


_RULES: dict[type[nn.Module], dict[str, Callable]] = {}


def register_folds(
    *kinds: type[nn.Module],
    folds: Callable | None = None,
    input_layers: Callable | None = None,
    output_folds: Callable | None = None,
    replace: Callable | None = None,
    writes: Callable | None = None,
    ffn_layers: Callable | None = None,
) -> None:
    """Gives classes of another library the methods ``folds()``, ``input_layers()`` and the others below.

    A rule holds for modules of exactly such a class: a subclass may read a norm in another place. Each rule is a
    function of the module.

    Example:
        A block whose ``norm`` is read by its linear layer ``fc`` and by nothing else::

            register_folds(ForeignBlock, folds=lambda block: [Fold('norm', before='fc')])

    Args:
        kinds: The classes.
        folds: Returns a :class:`Fold` for each norm of a module.
        input_layers: Returns the names of the layers inside that read the module's input. For ``'name[part]'`` the part
            is the second argument. Raises CannotFold if something else reads the input.
        output_folds: Returns a :class:`Fold` for each output of a backbone, in their order: the norm that the output
            has passed, and the modules inside the backbone that read the norm too.
        replace: Returns a module that computes the same from the same weights and has a method ``keep_padding()``.
            Fusion puts it in the place of the module before it changes one of the input layers.
        writes: Returns a :class:`Write` for each layer that writes the residual stream, for :func:`slab_det.absorb`.
        ffn_layers: Returns the names of the first layer, the activation and the second layer of an FFN, for
            :func:`slab_det.absorb`. Raises CannotFold if the FFN has more than these.
    """
    rules = dict(folds=folds, input_layers=input_layers, output_folds=output_folds)
    rules |= dict(replace=replace, writes=writes, ffn_layers=ffn_layers)
    for kind in kinds:
        _import_rules(kind)
        _RULES.setdefault(kind, {}).update({name: rule for name, rule in rules.items() if rule})


def _import_rules(kind: type[nn.Module]) -> None:
    """Imports the rules for a library only when one of its modules is met: its models take seconds to import."""
    library = kind.__module__.partition('.')[0]
    if library in ('mmpretrain', 'timm'):
        import_module(f'slab_det.fusion.stock_{library}')


def find_rule(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """The rule or method of :func:`register_folds` with this name for ``module``, bound to it, or None.

    A method counts only where no subclass replaces the ``forward`` that it describes: the subclass may read its norms
    and its input in other places, and has to define the method anew.
    """
    kind = type(module)
    _import_rules(kind)
    if name in _RULES.get(kind, {}):
        return partial(_RULES[kind][name], module)
    for ancestor in kind.__mro__:
        if name in vars(ancestor):
            return getattr(module, name)
        if 'forward' in vars(ancestor):
            return None
    return None


def find_hooks(module: nn.Module) -> str:
    """Names what runs besides the forward of the module's class; '' if nothing does."""
    if module._forward_pre_hooks or module._forward_hooks:
        return 'forward hooks'
    return 'a forward of its own' if 'forward' in vars(module) else ''
