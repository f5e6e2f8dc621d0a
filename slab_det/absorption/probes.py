"""Probes: points in a model at which absorption looks, and the layers that write the residual stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slab_det.fusion.folding import join_names
from slab_det.norms.folds import find_rule


class Probe(NamedTuple):
    """A point in a model: the first 'input' or first 'output' of a module, at its first call in a forward."""

    module: str
    side: str


class StreamLayer(NamedTuple):
    """A layer that writes the residual stream, or a convolution of a neck.

    Attributes:
        name: Its name in the model.
        source: Its input.
        target: The stream behind the layer, or its own output.
    """

    name: str
    source: Probe
    target: Probe


def find_stream_layers(model: nn.Module) -> list[StreamLayer]:
    """Finds the layers that write the residual stream and the convolutions of the neck, in the order of the modules."""
    found: dict[str, StreamLayer] = {}
    for prefix, module in model.named_modules():
        rule = find_rule(module, 'writes')
        # The rule of a block counts, not the rule of the FFN in it.
        if not rule or any(name.startswith(f'{prefix}.') for name in found):
            continue
        for write in rule():
            layer, stream, source = (name and join_names(prefix, name) for name in write)
            # A layer that is its own stream, such as a convolution of an FPN, is fitted to its output.
            target = Probe(stream, 'input') if stream not in ('', layer) else Probe(stream or prefix, 'output')
            found[layer] = StreamLayer(layer, Probe(source, 'output') if source else Probe(layer, 'input'), target)
    return [*found.values()]


def is_in_backbone(model: nn.Module, name: str) -> bool:
    """Whether a module with this name belongs to the backbone of a detector; in a backbone, every module does."""
    return name.startswith('backbone.') or not _has_backbone(model)


def run_as_far_as(model: nn.Module, image: Tensor, names: Iterable[str]) -> object:
    """Runs the backbone of a model on an image (B, 3, H, W), and the neck if one of these modules is there."""
    # A video detector has no extract_feat, so there is no known way to run its neck.
    if hasattr(model, 'extract_feat') and not all(is_in_backbone(model, name) for name in names):
        return model.extract_feat(image)
    return (model.backbone if _has_backbone(model) else model)(image)


def _has_backbone(model: nn.Module) -> bool:
    return isinstance(getattr(model, 'backbone', None), nn.Module)


def trace(model: nn.Module, image: Tensor, probes: Iterable[Probe]) -> list[Probe]:
    """Runs the model on an image, and returns the probes at each of their calls, in the order of the calls."""
    calls, probes = list[Probe](), [*dict.fromkeys(probes)]
    with ExitStack() as stack, torch.no_grad():
        for probe in probes:
            module = model.get_submodule(probe.module)
            stack.callback(register_probe(module, probe.side, lambda value, at=probe: calls.append(at)).remove)
        run_as_far_as(model, image, (probe.module for probe in probes))
    return calls


def is_shared(model: nn.Module, layer: str, calls: list[Probe]) -> bool:
    """Whether a layer is called twice in a forward or shares weights, so that its fits would undo each other."""
    parameters = [p for module in model.modules() for p in module._parameters.values()]
    own = {*map(id, model.get_submodule(layer).parameters())}
    return calls.count(Probe(layer, 'output')) > 1 or sum(id(p) in own for p in parameters) > len(own)


def register_probe(module: nn.Module, side: str, look: Callable[[object], object]) -> torch.utils.hooks.RemovableHandle:
    """Registers a hook that passes the arguments or the output of every call of a module to ``look``."""
    if side == 'input':
        return module.register_forward_pre_hook(lambda module, args: look(args))
    return module.register_forward_hook(lambda module, args, output: look(output))
