"""Fold rules name the layers that a norm folds into; :func:`register_folds` adds rules for foreign classes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

from mmcv.cnn import Conv2d, ConvTranspose2d, Linear
from torch import nn

from slab_det.common.errors import SlabDetError

# Layers that compute with their own weight and bias and nothing else. Exact types: a subclass or a parametrization may
# compute its weight. mmcv's layers differ from PyTorch's on empty inputs alone.
LINEAR, CONV, CONV_TRANSPOSE = (nn.Linear, Linear), (nn.Conv2d, Conv2d), (nn.ConvTranspose2d, ConvTranspose2d)


class CannotFold(SlabDetError):  # noqa: N818 (it ends no program: fuse leaves the norm as one multiply-add)
    """A norm cannot be folded into its neighbours; the message says why."""


class Fold(NamedTuple):
    """A norm and the layers it folds into: all the layers that read its output, or the layer whose output it reads.

    A module's method ``folds()`` yields one Fold for every norm of the module.

    Attributes:
        norm: Dotted name of the norm, relative to the module.
        before: Names of all the modules that read the output of the norm, or one name. A module that is not a linear
            layer names the layers that read its input by ``input_layers()``. Brackets name a part of a module:
            'attn[kv]' means the packed projections of k and v of an nn.MultiheadAttention.
        after: Name of the layer whose output the norm alone reads.
    """

    norm: str
    before: str | tuple[str, ...] = ()
    after: str = ''


class Write(NamedTuple):
    """A layer whose output is added to the residual stream. A module's method ``writes()`` yields one for each layer.

    Names are dotted and relative to the module. The input of the layer and the new stream must have the same tokens in
    the same order, channels last. A neck has no residual stream: each of its convolutions is its own ``stream``.

    Attributes:
        layer: The linear layer that writes: an nn.Linear or an nn.Conv2d of kernel 1, or any nn.Conv2d in a neck.
        stream: The norm whose input is the new stream; '' where the module returns the new stream.
        source: The module whose output the layer reads, at its first call; '' where the layer is called as a module.
    """

    layer: str
    stream: str = ''
    source: str = ''


class Channels(NamedTuple):
    """Hidden channels, which can be removed: ``writers`` compute them, and nothing but ``readers`` reads them.

    A module's method ``hidden_channels()`` yields one for each unit, channels that go together. Names are dotted and
    relative to the module.

    Attributes:
        name: Name of the unit; '' for the module itself.
        writers: Layers whose outputs are the channels. The layer of an attention writes q, k and v, one after another.
        readers: The layers that read the channels.
        between: What stands between, in any order: activations, depthwise convolutions, batch norms and group norms.
        heads: Number of attention heads, consecutive channels of equal number. An equal number stays in each head.
        tokens: In an attention, the tokens that queries come from and the tokens that keys come from, each as the
            name of a module and its side, 'input' or 'output'.
        levels: 1 if all readers read all levels of the pyramid. Otherwise the number of levels; ``readers`` then lists
            the readers of the first level, of the second, and so on, equally many each.
        maps: Whether the channels are those of a neck's maps: each map is linear in the output of its writer, and the
            readers are linear in the maps. RoI extractors may stand between.
    """

    name: str
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    between: tuple[str, ...] = ()
    heads: int = 1
    tokens: tuple[tuple[str, str], ...] = ()
    levels: int = 1
    maps: bool = False


# The module with the rules for a library, by the library's name; imported at the first use, because it takes seconds.
LIBRARY_RULES = dict(timm='slab_det.fusion.timm_rules', mmpretrain='slab_det.fusion.mmpretrain_rules')
_RULES: dict[type[nn.Module], dict[str, Callable]] = {}


def register_folds(
    *kinds: type[nn.Module],
    folds: Callable | None = None,
    input_layers: Callable | None = None,
    output_folds: Callable | None = None,
    writes: Callable | None = None,
    hidden_channels: Callable | None = None,
) -> None:
    """Registers rules for classes of another library, in place of methods ``folds()``, ``input_layers()`` and so on.

    Each rule is a function of the module. It does not apply to subclasses, which may read a norm elsewhere.

    Example:
        A block whose linear layer ``fc`` alone reads the output of ``norm``::

            register_folds(ForeignBlock, folds=lambda block: [Fold('norm', before='fc')])

    Args:
        kinds: The classes.
        folds: Returns a :class:`Fold` for each norm of a module.
        input_layers: Returns the names of the module's layers that read its input. For ``'name[part]'`` the part is the
            second argument. Raises CannotFold if anything but a layer reads the input.
        output_folds: Returns a :class:`Fold` for each output of a backbone, in the order of the outputs: the norm whose
            output it is, and the modules inside the backbone that also read the norm.
        writes: Returns a :class:`Write` for each layer that writes the residual stream, for :func:`slab_det.absorb`.
        hidden_channels: Returns a :class:`Channels` for each unit of hidden channels, for :func:`slab_det.absorb`.
            Raises CannotFold if the module has layers that keep all of its channels.
    """
    rules = dict(folds=folds, input_layers=input_layers, output_folds=output_folds)
    rules |= dict(writes=writes, hidden_channels=hidden_channels)
    for kind in kinds:
        _import_rules(kind)
        _RULES.setdefault(kind, {}).update({name: rule for name, rule in rules.items() if rule})


def _import_rules(kind: type[nn.Module]) -> None:
    if module := LIBRARY_RULES.get(kind.__module__.partition('.')[0]):
        import_module(module)


def find_rule(module: nn.Module, name: str) -> Callable[..., Any] | None:
    """The registered rule of this name for ``module``, or else its method of this name; None if it has neither.

    A subclass that overrides ``forward`` may read its norms and its input elsewhere, so methods of its base
    classes are ignored: it has to define its own.
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


def describe_hooks(module: nn.Module) -> str:
    """Says what a module runs besides its class's forward: 'forward hooks', 'a forward of its own', or ''."""
    if module._forward_pre_hooks or module._forward_hooks:
        return 'forward hooks'
    return 'a forward of its own' if 'forward' in vars(module) else ''
