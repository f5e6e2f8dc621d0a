"""Observes a teacher: sums over what it computes around its units of channels, of which prices and drafts are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from copy import copy
from functools import partial

import torch
from torch import Tensor, nn

from slab_det.absorption.moments import CrossMoments
from slab_det.absorption.plan import AbsorptionPlan
from slab_det.absorption.steps import HeadStep, MapReaderStep, MapStep, RankStep, WriterStep
from slab_det.absorption.tokens import input_tokens, output_tokens, sample_tokens
from slab_det.absorption.walk import Probe, register_probe
from slab_det.common.tensors import tensors_in
from slab_det.fusion.channels import ChannelUnit


class Observed:
    """Sums over what the teacher computes around a unit.

    Attributes:
        channels: The channels as x, as the readers of each level read them; of a neck's maps, of all levels together.
        stream: The residual stream behind the readers as y; empty in neck and heads.
        queries, keys: In an attention, the tokens that queries and keys come from as x.
        readers: The inputs of each layer that reads a neck's maps as x, by its name, but for layers with more than
            ``MAX_COLUMNS`` inputs.
    """

    def __init__(self, unit: ChannelUnit) -> None:
        self.channels = [CrossMoments() for _ in unit.readers_of_levels]
        self.stream, self.queries, self.keys = (CrossMoments() for _ in range(3))
        self.readers: dict[str, CrossMoments] = {}

    def merge(self, other: Observed) -> Observed:
        """The sums over the batches of both; ``readers``, of which no price is estimated, stay those of the first."""
        joint = copy(self)
        joint.channels = [mine.merge(more) for mine, more in zip(self.channels, other.channels, strict=True)]
        for name in ('stream', 'queries', 'keys'):
            setattr(joint, name, getattr(self, name).merge(getattr(other, name)))
        return joint


@torch.no_grad()
def observe(
    plan: AbsorptionPlan, model: nn.Module, units: Mapping[str, ChannelUnit], batches: Iterable[int]
) -> dict[str, Observed]:
    """Runs a copy of the teacher on some batches, and returns what it computes around each unit, by name."""
    observed = {name: Observed(unit) for name, unit in units.items()}
    heads = {step.name: block for block, steps in plan.blocks.items() for step in steps}
    # How often each sum was added to in a forward.
    calls: Counter[CrossMoments] = Counter()

    def see(value: object, moments: CrossMoments, is_stream: bool) -> None:
        calls[moments] += 1
        # A dropout has two calls in an FFN.
        if calls[moments] > 1:
            return
        x = tensors_in(value)[0]
        # A convolution in an FFN has kernel 1 and reads a map or tokens.
        (tokens,) = sample_tokens(x.flatten(2).transpose(1, 2) if x.ndim == 4 else x)
        # Only the variance of the stream is needed.
        moments.add(*(tokens[:, :1], tokens) if is_stream else (tokens,))

    def see_map(layer: nn.Module, args: tuple, output: Tensor, moments: CrossMoments, level: int) -> None:
        weight = output_tokens(plan.images.regions[batch].weights[level])
        moments.add(output_tokens(output), weight=weight)

    def see_reader(layer: nn.Module, args: tuple, output: Tensor, moments: CrossMoments, head: str, level: int) -> None:
        weight = plan.images.regions[batch].position_weights(head, level + calls[moments])
        calls[moments] += 1
        weight = None if weight is None else output_tokens(weight)
        moments.add(input_tokens(layer, args[0], output), weight=weight)

    with ExitStack() as stack:

        def hook(layer: str, look: Callable, **options: object) -> None:
            handle = model.get_submodule(layer).register_forward_hook(partial(look, **options))
            stack.callback(handle.remove)

        def probe(at: Probe, moments: CrossMoments, is_stream: bool = False) -> None:
            look = partial(see, moments=moments, is_stream=is_stream)
            handle = register_probe(model.get_submodule(at.module), at.side, look)
            stack.callback(handle.remove)

        for step in (step for step in plan.steps if step.unit in units):
            unit, found = units[step.unit], observed[step.unit]
            if isinstance(step, WriterStep):
                probe(step.source, found.channels[0])
                probe(step.target, found.stream, is_stream=True)
            elif isinstance(step, RankStep):
                probe(step.source, found.queries)
                probe(step.target, found.keys)
            elif isinstance(step, MapStep):
                for level, writer in enumerate(unit.writers):
                    hook(writer, see_map, moments=found.channels[0], level=level)
            elif isinstance(step, MapReaderStep) and step.can_fit(model):
                moments = found.readers[step.name] = CrossMoments()
                hook(step.name, see_reader, moments=moments, head=heads[step.name], level=0)
            elif isinstance(step, HeadStep):
                for level, (reader, *_) in enumerate(unit.readers_of_levels):
                    hook(reader, see_reader, moments=found.channels[level], head=unit.owner, level=level)
        for batch in batches:
            calls.clear()
            plan.forward(model)(plan.images.store.get(str(batch)), batch)
    return observed
