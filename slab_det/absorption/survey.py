"""The survey of an absorption: what hidden channels save and cost, and how many stay for a number of multiply-adds."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slab_det.absorption.elimination import join_channels, lost_logits, rank_channels
from slab_det.absorption.images import WHOLE, is_held_out
from slab_det.absorption.maps import rank_maps, sensitivity
from slab_det.absorption.moments import CrossMoments
from slab_det.absorption.plan import AbsorptionPlan
from slab_det.absorption.steps import HeadStep, MapStep, RankStep, WriterStep
from slab_det.absorption.tokens import input_tokens, output_tokens, sample_tokens
from slab_det.absorption.walk import Probe, register_probe
from slab_det.common.errors import ConversionError
from slab_det.common.tensors import tensors_in
from slab_det.fusion.channels import ChannelUnit, find_channels, input_weight, output_parameters
from slab_det.measure.cost import count_multiply_adds

# Most batches on which losses are estimated.
SURVEY = 64


@dataclass
class Prices:
    """What the channels of a unit cost.

    Attributes:
        unit: The unit.
        counts: The numbers of channels that may stay, from all of them down.
        losses: Estimated loss for each of them, 0 for all channels: the variance of the error in the residual stream,
            or of a head's outputs, over the variance of the stream or of the outputs.
    """

    unit: ChannelUnit
    counts: list[int]
    losses: list[float]


class Survey:
    """The units of a detector, the losses they would bring, and the multiply-adds of the layers.

    Attributes:
        prices: Of each unit, by its name.
        total: Multiply-adds of the first batch, whole, in the backbone, the neck and the heads that absorption runs.
        unknown: Names of the units that too few tokens of the images reach, so that all of their channels stay.
        layers: For each layer that reads or writes hidden channels: its multiply-adds, and the names of the units that
            it reads and writes.
    """

    def __init__(self, plan: AbsorptionPlan) -> None:
        self.plan, model = plan, plan.copy_teacher()
        with LayerCosts() as costs:
            self.total = self.count(model)
        reached = {step.unit for step in plan.steps}
        units = {name: unit for name, unit in find_channels(model).items() if name in reached and not unit.reason}
        observed = observe(plan, model, units)
        losses = {name: estimate_losses(model, unit, observed[name]) for name, unit in units.items()}
        self.prices = {
            name: Prices(unit, possible_counts(unit), losses[name]) for name, unit in units.items() if losses[name]
        }
        self.unknown = [name for name in units if not losses[name]]
        self.layers: dict[str, tuple[float, list[str]]] = {}
        for name, prices in self.prices.items():
            for layer in (*prices.unit.writers, *prices.unit.between, *prices.unit.readers):
                cost, names = self.layers.setdefault(layer, (costs.of(model.get_submodule(layer)), []))
                names.append(name)

    def multiply_adds(self, counts: Mapping[str, int], layers: Iterable[str] = ()) -> float:
        """The multiply-adds with these numbers of channels, of the whole detector or of some layers."""

        def share(name: str) -> float:
            unit = self.prices[name].unit
            return counts.get(name, unit.count) / unit.count

        parts = {layer: self.layers[layer] for layer in layers or self.layers}
        rest = 0 if layers else self.total - sum(cost for cost, _ in parts.values())
        return rest + sum(cost * math.prod(map(share, names)) for cost, names in parts.values())

    def choose(self, share: float) -> dict[str, int]:
        """The numbers of channels to leave, by unit, so that this share of the multiply-adds is left.

        One after another, the channels go that have the least estimated loss for each multiply-add that they save.

        Raises:
            ConversionError: If more multiply-adds are left with the fewest channels everywhere.
        """
        at, counts = dict.fromkeys(self.prices, 0), {}
        layers = {name: [layer for layer, (_, names) in self.layers.items() if name in names] for name in self.prices}
        left = float(self.total)
        while left > share * self.total:
            best = None
            for name, prices in self.prices.items():
                fewer = at[name] + 1
                if fewer == len(prices.counts):
                    continue
                before = self.multiply_adds(counts, layers[name])
                saved = before - self.multiply_adds({**counts, name: prices.counts[fewer]}, layers[name])
                price = (prices.losses[fewer] - prices.losses[at[name]]) / max(saved, 1.0)
                if best is None or price < best[0]:
                    best = price, name, saved
            if best is None:
                raise ConversionError(
                    f'channels={share:g}: with the fewest channels everywhere {left / self.total:.2f} of the '
                    'multiply-adds are left; give a larger share'
                )
            _, name, saved = best
            at[name] += 1
            counts[name] = self.prices[name].counts[at[name]]
            left -= saved
        return counts

    def count(self, student: nn.Module) -> int:
        """The multiply-adds of a student, counted as :attr:`total` is."""
        image, run = self.plan.images.store.get(str(WHOLE)), self.plan.forward(student)
        return count_multiply_adds(lambda: run(image, WHOLE))

    def least_share(self) -> float:
        """The share of the multiply-adds that is left with the fewest channels everywhere."""
        return self.multiply_adds({name: prices.counts[-1] for name, prices in self.prices.items()}) / self.total


def possible_counts(unit: ChannelUnit) -> list[int]:
    """The numbers of channels that may stay, from all down: multiples of 8, in whole groups of a group norm; in an
    attention, multiples of 16, 8 or 4 per head."""
    # A kernel for 24 of 32 channels per head is hardly faster than one for 32.
    width = unit.count // unit.heads
    step = math.lcm(8, unit.group) if not unit.tokens else 16 if width > 16 else 8 if width > 8 else 4
    return [unit.count, *(unit.heads * left for left in reversed(range(step, width, step)))]


class LayerCosts(TorchFunctionMode):
    """Counts the multiply-adds of each weight; softmax attention counts with the layer that reads its output."""

    def __init__(self) -> None:
        super().__init__()
        # By the address of the weight, because a layer may be applied in parts.
        self.costs, self.attention = defaultdict(float), 0.0

    def of(self, layer: nn.Module) -> float:
        """The multiply-adds of a layer; 0 for a layer without weights, such as an activation."""
        parameters = output_parameters(layer)
        return self.costs[parameters[0].untyped_storage().data_ptr()] if parameters else 0.0

    def __torch_function__(self, function: Callable, types: Sequence, args: Sequence = (), kwargs: dict | None = None):
        out = function(*args, **(kwargs or {}))
        if function is F.scaled_dot_product_attention:
            q, k, v = args[:3]
            self.attention += q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        elif function in (F.linear, F.conv2d, F.conv_transpose2d):
            weight = args[1]
            size = args[0].numel() if function is F.conv_transpose2d else out.numel()
            self.costs[weight.untyped_storage().data_ptr()] += size * weight[0].numel() + self.attention
            self.attention = 0.0
        return out


class Observed:
    """Sums over what the teacher computes around a unit.

    Attributes:
        channels: The channels as x, as the readers of each level read them; of a neck's maps, of all levels together.
        stream: The residual stream behind the readers as y; empty in neck and heads.
        queries, keys: In an attention, the tokens that queries and keys come from as x.
    """

    def __init__(self, unit: ChannelUnit) -> None:
        self.channels = [CrossMoments() for _ in unit.readers_of_levels]
        self.stream, self.queries, self.keys = (CrossMoments() for _ in range(3))


@torch.no_grad()
def observe(plan: AbsorptionPlan, model: nn.Module, units: Mapping[str, ChannelUnit]) -> dict[str, Observed]:
    """Runs a copy of the teacher on batches to fit, and returns what it computes around each unit, by name."""
    observed = {name: Observed(unit) for name, unit in units.items()}
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
            elif isinstance(step, HeadStep):
                for level, (reader, *_) in enumerate(unit.readers_of_levels):
                    hook(reader, see_reader, moments=found.channels[level], head=unit.owner, level=level)
        for batch in islice((i for i in range(plan.images.count) if not is_held_out(i)), SURVEY):
            calls.clear()
            plan.forward(model)(plan.images.store.get(str(batch)), batch)
    return observed


@torch.no_grad()
def estimate_losses(model: nn.Module, unit: ChannelUnit, observed: Observed) -> list[float]:
    """:attr:`Prices.losses`, each as if nothing else were removed; empty if too few tokens reach the unit."""
    counts = possible_counts(unit)
    if unit.maps:
        (maps,) = observed.channels
        if maps.count < unit.count:
            return []
        _, added = rank_maps(maps, sensitivity(model, unit, maps))
        return [0.0, *(float(added[unit.count - count - 1]) for count in counts[1:])]
    weights = [
        torch.cat([input_weight(model.get_submodule(name)) for name in names]).double()
        for names in unit.readers_of_levels
    ]
    if any(part.count < weight.shape[1] for part, weight in zip(observed.channels, weights, strict=True)):
        return []
    # The outputs of the readers, which are linear in the channels.
    parts = [part.with_target(weight) for part, weight in zip(observed.channels, weights, strict=True)]
    if observed.stream.count:
        scale = sum(observed.stream.variance() * part.count for part in parts)
    else:
        # Outputs of several layers, such as classes and boxes, have different scales.
        parts = [part.divide_target(part.yy.clamp(min=1e-300).sqrt()) for part in parts]
        scale = sum(map(len, weights))
    joint = join_channels(parts, unit.count)
    _, added = rank_channels(joint, unit.heads, len(joint.xx) // unit.count * unit.group)
    losses = [0.0, *(float(added[(unit.count - count) // unit.group - 1]) / scale for count in counts[1:])]
    if not unit.tokens:
        return losses
    (values,) = parts
    projection = output_parameters(model.get_submodule(unit.writers[0]))
    lost = lost_logits(observed.queries, observed.keys, *projection, unit.heads)
    # A small error e of the logits multiplies the weights of the values by about 1 + e.
    squares = lost.clamp(min=0) * model.get_submodule(unit.owner).qk_scale ** 2
    errors = [float(squares[:, count // unit.heads].clamp(max=1.0).mean()) for count in counts[1:]]
    by_rank = (error * float(values.yy.sum()) / scale for error in errors)
    return [0.0, *(loss + more for loss, more in zip(losses[1:], by_rank, strict=True))]
