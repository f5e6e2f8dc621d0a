"""Observes a teacher: sums over what it computes around its units of channels, of which students are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from functools import partial

import torch
from torch import Tensor, nn

from slab_det.absorption.images import Images
from slab_det.absorption.moments import CrossMoments
from slab_det.absorption.probes import (
    Probe,
    find_stream_layers,
    is_in_backbone,
    is_shared,
    register_probe,
    run_as_far_as,
    trace,
)
from slab_det.absorption.tokens import input_tokens, output_tokens, sample_tokens
from slab_det.common.errors import ConversionError
from slab_det.common.progress import Progress
from slab_det.common.tensors import tensors_in
from slab_det.families import find_absorbed
from slab_det.fusion.channels import ChannelUnit, find_channels

# Most inputs of a layer that is fitted because maps lost channels: the sums of more would take gigabytes.
MAX_COLUMNS = 8192


class Observed:
    """Sums over what the teacher computes around a unit.

    Attributes:
        channels: The channels as x, as the readers of each level read them; of maps, of all levels together.
        stream: The residual stream behind the readers as y; empty in neck and heads.
        queries, keys: In an attention, the tokens that queries and keys come from as x.
        readers: By name, the inputs, as x, of each layer that reads maps. Layers with more than ``MAX_COLUMNS`` inputs,
            and layers that also write maps of the unit, are left out.
    """

    def __init__(self, unit: ChannelUnit, model: nn.Module, int8: bool) -> None:
        self.channels = [CrossMoments(int8) for _ in unit.readers_of_levels[: 1 if unit.maps else None]]
        self.stream, self.queries, self.keys = (CrossMoments(int8) for _ in range(3))
        # Convolutions of a neck may read a map to write a smaller one.
        others = [name for name in unit.readers if unit.maps and name not in unit.writers]
        fitted = [name for name in others if model.get_submodule(name).weight[0].numel() <= MAX_COLUMNS]
        self.readers = {name: CrossMoments(int8) for name in fitted}

    def merge(self, other: Observed) -> Observed:
        """The sums over the batches of both."""
        joint = copy(self)
        joint.channels = [mine.merge(more) for mine, more in zip(self.channels, other.channels, strict=True)]
        for name in ('stream', 'queries', 'keys'):
            setattr(joint, name, getattr(self, name).merge(getattr(other, name)))
        joint.readers = {name: part.merge(other.readers[name]) for name, part in self.readers.items()}
        return joint


class Observer:
    """Looks at the units of a teacher.

    Args:
        model: The teacher, in eval mode, without norms of slab_det.
        images: Its images.
        int8: See :func:`slab_det.absorb`.

    Attributes:
        units: The units whose channels can go, by name.
        reasons: Why no channel of the other units can go, by name.
    """

    def __init__(self, model: nn.Module, images: Images, int8: bool) -> None:
        self.model, self.images, self.int8 = model, images, int8
        self.family = find_absorbed(model) if images.regions else None
        layers = find_stream_layers(model)
        self.stream_layers = {layer.name: layer for layer in layers}
        found = find_channels(model)
        probes = [layer.target for layer in layers] + [Probe(layer.name, 'output') for layer in layers]
        probes += [at for unit in found.values() for at in self._tokens(unit)]
        calls = trace(model, images.store.get('0'), probes)
        reached = {name: unit for name, unit in found.items() if self._is_reached(unit, calls)}
        self.units = {name: unit for name, unit in reached.items() if not unit.reason}
        self.reasons = {name: unit.reason for name, unit in reached.items() if unit.reason}

    def _tokens(self, unit: ChannelUnit) -> list[Probe]:
        return [Probe(*at) for at in unit.tokens]

    def _is_reached(self, unit: ChannelUnit, calls: list[Probe]) -> bool:
        """Whether absorption runs the layers of a unit, those of a backbone once."""
        if not is_in_backbone(self.model, unit.name):
            return self.family is not None
        if unit.reason:
            return True
        layers = [self.stream_layers[name] for name in unit.readers if name in self.stream_layers]
        if not layers or any(is_shared(self.model, layer.name, calls) for layer in layers):
            return False
        # A module that a forward calls twice has more than one stream.
        return all(calls.count(at) == 1 for at in (*self._tokens(unit), *(layer.target for layer in layers)))

    def run(self, model: nn.Module, image: Tensor, batch: int) -> None:
        """Runs a copy of the teacher as far as its channels can go: heads at the regions that the teacher found."""
        found = model.extract_feat(image) if self.family else run_as_far_as(model, image, self.units)
        if self.family:
            self.family.run_heads(model, found, self.images.regions[batch])

    @torch.no_grad()
    def observe(self, batches: Sequence[int], progress: bool = False) -> dict[str, Observed]:
        """Runs the teacher on some batches, and returns what it computes around each unit, by name.

        Raises:
            ConversionError: If values are not finite.
        """
        observed = {name: Observed(unit, self.model, self.int8) for name, unit in self.units.items()}
        if not observed:
            return observed
        # How often each sum was added to in a forward.
        calls: Counter[CrossMoments] = Counter()

        def see(value: object, moments: CrossMoments, is_map: bool = False, is_stream: bool = False) -> None:
            calls[moments] += 1
            # A dropout has two calls in an FFN.
            if calls[moments] > 1:
                return
            x = tensors_in(value)[0]
            (tokens,) = sample_tokens(x.flatten(2).transpose(1, 2) if is_map and x.ndim == 4 else x)
            # Only the variance of the stream is needed.
            moments.add(*(tokens[:, :1], tokens) if is_stream else (tokens,))

        def see_map(value: object, moments: CrossMoments, level: int) -> None:
            weight = output_tokens(self.images.regions[batch].weights[level])
            moments.add(output_tokens(tensors_in(value)[0]), weight=weight)

        def see_reader(layer: nn.Module, args: tuple, output: Tensor, moments: CrossMoments, name: str, level: int):
            weight = self.images.regions[batch].position_weights(name, level + calls[moments])
            calls[moments] += 1
            weight = None if weight is None else output_tokens(weight)
            moments.add(input_tokens(layer, args[0], output), weight=weight)

        with ExitStack() as stack:

            def hook(layer: str, look: Callable, **options: object) -> None:
                handle = self.model.get_submodule(layer).register_forward_hook(partial(look, **options))
                stack.callback(handle.remove)

            def probe(at: Probe, look: Callable, **options: object) -> None:
                module = self.model.get_submodule(at.module)
                stack.callback(register_probe(module, at.side, partial(look, **options)).remove)

            for name, unit in self.units.items():
                found, stream_layer = observed[name], self.stream_layers.get(unit.readers[0])
                if unit.maps:
                    # Behind its lateral convolutions an FPN adds the maps of coarser levels.
                    layers, side = (unit.readers, 'input') if unit.is_per_level else (unit.writers, 'output')
                    for level, layer in enumerate(layers):
                        probe(Probe(layer, side), see_map, moments=found.channels[0], level=level)
                    for level, (reader, moments) in enumerate(found.readers.items()):
                        hook(reader, see_reader, moments=moments, name=reader, level=level if unit.is_per_level else 0)
                elif stream_layer:
                    # A convolution in an FFN has kernel 1 and reads a map or tokens.
                    is_map = isinstance(self.model.get_submodule(stream_layer.name), nn.Conv2d)
                    probe(stream_layer.source, see, moments=found.channels[0], is_map=is_map)
                    probe(stream_layer.target, see, moments=found.stream, is_map=is_map, is_stream=True)
                    for at, moments in zip(self._tokens(unit), (found.queries, found.keys), strict=False):
                        probe(at, see, moments=moments)
                else:
                    for level, (reader, *_) in enumerate(unit.readers_of_levels):
                        hook(reader, see_reader, moments=found.channels[level], name=reader, level=level)
            for batch in Progress(batches, 'Layers of the teacher', disable=not progress):
                calls.clear()
                self.run(self.model, self.images.store.get(str(batch)), batch)
        # A value that is not finite reaches the maps last.
        for name, found in sorted(observed.items(), key=lambda item: self.units[item[0]].maps):
            parts = *found.channels, found.stream, found.queries, found.keys, *found.readers.values()
            if not all(part.is_finite() for part in parts):
                raise ConversionError(f'{name}: its input or output is NaN or infinite; check weights and images')
        return observed
