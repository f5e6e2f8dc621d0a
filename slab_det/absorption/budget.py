"""Chooses how many hidden channels stay in each place of a detector, for a number of multiply-adds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slab_det.absorption.images import WHOLE, is_held_out
from slab_det.absorption.maps import rank_maps, sensitivity
from slab_det.absorption.plan import AbsorptionPlan
from slab_det.absorption.regression import CrossMoments, join_channels, lost_logits, rank_channels
from slab_det.absorption.student import copy_teacher
from slab_det.absorption.tokens import input_tokens, output_tokens, sample_tokens
from slab_det.absorption.walk import register_probe
from slab_det.fusion.channels import HiddenChannels, find_channels, input_weight, output_parameters
from slab_det.measure.cost import count_multiply_adds
from slab_det.runtime.errors import ConversionError
from slab_det.runtime.tensors import tensors_in

# Most batches on which losses are estimated.
SURVEY = 64


@dataclass
class Place:
    """What is known of a place with hidden channels before anything is removed.

    Attributes:
        place: The place.
        counts: The numbers of channels that may stay, from all of them down.
        losses: Estimated loss for each of them, 0 for all channels: the variance of the error in the residual stream,
            or of a head's outputs, over the variance of the stream or of the outputs.
    """

    place: HiddenChannels
    counts: list[int]
    losses: list[float]


class Survey:
    """The places of a detector, the losses they would bring, and the multiply-adds of the layers.

    Attributes:
        places: By name.
        total: Multiply-adds of the first batch, whole, in the backbone, the neck and the heads that absorption runs.
        unknown: Names of the places that too few tokens of the images reach, so that all of their channels stay.
        layers: For each layer that reads or writes hidden channels: its multiply-adds, and the names of the places that
            it reads and writes.
    """

    def __init__(self, plan: AbsorptionPlan) -> None:
        model = copy_teacher(plan)
        with LayerCosts() as costs:
            self.total = self.count(plan, model)
        steps = {step.place: step for steps in plan.blocks.values() for step in steps if step.place}
        found = {name: place for name, place in find_channels(model).items() if name in steps and not place.reason}
        losses = estimate_losses(plan, model, found)
        # A place without losses was reached by too few tokens.
        self.places = {name: Place(place, possible_counts(place), losses[name]) for name, place in found.items()}
        self.unknown = [name for name, place in self.places.items() if not place.losses]
        for name in self.unknown:
            del self.places[name]
        self.layers: dict[str, tuple[float, list[str]]] = {}
        for name, place in found.items():
            for layer in (*place.writers, *place.between, *place.readers) if name in self.places else ():
                cost, names = self.layers.setdefault(layer, (costs.of(model.get_submodule(layer)), []))
                names.append(name)

    def multiply_adds(self, counts: Mapping[str, int], layers: Iterable[str] = ()) -> float:
        """The multiply-adds with these numbers of channels, of the whole detector or of some layers."""

        def share(name: str) -> float:
            place = self.places[name].place
            return counts.get(name, place.count) / place.count

        parts = {layer: self.layers[layer] for layer in layers or self.layers}
        rest = 0 if layers else self.total - sum(cost for cost, _ in parts.values())
        return rest + sum(cost * math.prod(map(share, names)) for cost, names in parts.values())

    def choose(self, share: float) -> dict[str, int]:
        """The numbers of channels to leave, by place, so that this share of the multiply-adds is left.

        One after another, the step goes that has the least estimated loss for each multiply-add that it saves.

        Raises:
            ConversionError: If more multiply-adds are left with the fewest channels everywhere.
        """
        at, counts = dict.fromkeys(self.places, 0), {}
        layers = {name: [layer for layer, (_, names) in self.layers.items() if name in names] for name in self.places}
        left = float(self.total)
        while left > share * self.total:
            best = None
            for name, place in self.places.items():
                step = at[name] + 1
                if step == len(place.counts):
                    continue
                before = self.multiply_adds(counts, layers[name])
                saved = before - self.multiply_adds({**counts, name: place.counts[step]}, layers[name])
                price = (place.losses[step] - place.losses[at[name]]) / max(saved, 1.0)
                if best is None or price < best[0]:
                    best = price, name, saved
            if best is None:
                raise ConversionError(
                    f'channels={share:g}: with the fewest channels in every place {left / self.total:.2f} of the '
                    'multiply-adds are left; give a larger share'
                )
            _, name, saved = best
            at[name] += 1
            counts[name] = self.places[name].counts[at[name]]
            left -= saved
        return counts

    def count(self, plan: AbsorptionPlan, student: nn.Module) -> int:
        """The multiply-adds of a student, counted as :attr:`total` is."""
        image = plan.images.store.get(str(WHOLE))
        return count_multiply_adds(lambda: plan.forward(student)(image, WHOLE))

    def least_share(self) -> float:
        """The share of the multiply-adds that is left with the fewest channels in every place."""
        return self.multiply_adds({name: place.counts[-1] for name, place in self.places.items()}) / self.total


def possible_counts(place: HiddenChannels) -> list[int]:
    """The numbers of channels that may stay, from all down: multiples of 8, in whole groups of a group norm; in an
    attention, multiples of 16, 8 or 4 per head."""
    # A kernel for 24 of 32 channels per head is hardly faster than one for 32.
    width = place.count // place.heads
    unit = math.lcm(8, place.group) if not place.tokens else 16 if width > 16 else 8 if width > 8 else 4
    return [place.count, *(place.heads * left for left in reversed(range(unit, width, unit)))]


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


@torch.no_grad()
def estimate_losses(
    plan: AbsorptionPlan, model: nn.Module, places: Mapping[str, HiddenChannels]
) -> dict[str, list[float]]:
    """:attr:`Place.losses` of each place of the copied teacher, each estimated as if nothing else were removed."""
    moments: dict[tuple[str, str], CrossMoments] = defaultdict(CrossMoments)
    seen: set[tuple[str, str]] = set()
    calls: dict[tuple[str, str], int] = defaultdict(int)

    def see(value: object, key: tuple[str, str]) -> None:
        # A dropout stands in two places of an FFN.
        if key in seen:
            return
        seen.add(key)
        x = tensors_in(value)[0]
        # A convolution in an FFN has kernel 1 and reads a map or tokens.
        (tokens,) = sample_tokens(x.flatten(2).transpose(1, 2) if x.ndim == 4 else x)
        # Only the variance of the stream is needed.
        moments[key].add(*(tokens[:, :1], tokens) if key[1] == 'stream' else (tokens, tokens[:, :1]))

    def see_map(layer: nn.Module, args: tuple, output: Tensor, key: tuple[str, str], level: int) -> None:
        tokens, weight = output_tokens(output), output_tokens(plan.images.regions[batch].weights[level])
        moments[key].add(tokens, tokens[..., :1], weight)

    def see_reader(layer: nn.Module, args: tuple, output: Tensor, key: tuple[str, str], level: int) -> None:
        weight = plan.images.regions[batch].position_weights(places[key[0]].owner, level + calls[key])
        weight = None if weight is None else output_tokens(weight)
        calls[key] += 1
        moments[key].add(input_tokens(layer, args[0], output), output_tokens(output, layer), weight)

    with ExitStack() as stack:

        def probe(at: tuple[str, str], look: Callable[[object], None]) -> None:
            stack.callback(register_probe(model.get_submodule(at[0]), at[1], look).remove)

        for step in (step for steps in plan.blocks.values() for step in steps if step.place in places):
            name, place = step.place, places[step.place]
            if step.name != name:
                probe(step.source, partial(see, key=(name, 'hidden')))
                probe(step.target, partial(see, key=(name, 'stream')))
            elif place.tokens:
                probe(step.source, partial(see, key=(name, 'queries')))
                probe(step.target, partial(see, key=(name, 'keys')))
            elif place.maps:
                for level, writer in enumerate(place.writers):
                    hook = partial(see_map, key=(name, 'maps'), level=level)
                    stack.callback(model.get_submodule(writer).register_forward_hook(hook).remove)
            else:
                for level, (reader, *_) in enumerate(place.readers_of_levels):
                    hook = partial(see_reader, key=(name, reader), level=level)
                    stack.callback(model.get_submodule(reader).register_forward_hook(hook).remove)
        for batch in islice((i for i in range(plan.images.count) if not is_held_out(i)), SURVEY):
            seen.clear()
            calls.clear()
            plan.forward(model)(plan.images.store.get(str(batch)), batch)
    return {name: _losses(model, place, moments) for name, place in places.items()}


def _losses(model: nn.Module, place: HiddenChannels, moments: Mapping[tuple[str, str], CrossMoments]) -> list[float]:
    counts = possible_counts(place)
    if place.maps:
        maps = moments[place.name, 'maps']
        if maps.count < place.count:
            return []
        _, added = rank_maps(maps, sensitivity(model, place, maps))
        return [0.0, *(float(added[place.count - count - 1]) for count in counts[1:])]
    stream, parts, scale = moments.get((place.name, 'stream')), [], 0.0
    for names in place.readers_of_levels:
        weight = torch.cat([input_weight(model.get_submodule(name)) for name in names]).double()
        hidden = moments[place.name, 'hidden' if stream else names[0]]
        if hidden.count < weight.shape[1]:
            return []
        # The outputs of the readers, which are linear in the channels.
        hidden.xy, variance = hidden.xx @ weight.T, ((weight @ hidden.xx) * weight).sum(1)
        if stream is None:
            # Outputs of several layers, such as classes and boxes, have different units.
            hidden.xy /= variance.clamp(min=1e-300).sqrt()
            scale += len(weight)
        else:
            scale += stream.variance() * hidden.count
        parts.append(hidden)
    joint = join_channels(parts, place.count)
    _, added = rank_channels(joint, place.heads, len(joint.xx) // place.count * place.group)
    losses = [0.0, *(float(added[(place.count - count) // place.group - 1]) / scale for count in counts[1:])]
    if place.tokens:
        scale_qk = model.get_submodule(place.owner).qk_scale
        parts = output_parameters(model.get_submodule(place.writers[0]))
        lost = lost_logits(moments[place.name, 'queries'], moments[place.name, 'keys'], *parts, place.heads)
        # A small error e of the logits multiplies the weights of the values by about 1 + e.
        squares = lost.clamp(min=0) * scale_qk**2
        for i, count in enumerate(counts[1:], 1):
            error = float(squares[:, count // place.heads].clamp(max=1.0).mean())
            losses[i] += error * float(variance.sum()) / scale
    return losses
