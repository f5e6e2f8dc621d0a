"""What the hidden channels of a unit are estimated to cost, and the order in which they go."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor, nn

from slab_det.absorption.channels.elimination import join_channels, lost_logits, rank_channels
from slab_det.absorption.channels.maps import find_components, measure_sensitivity
from slab_det.absorption.channels.observed import Observed
from slab_det.absorption.channels.pruning import with_outputs
from slab_det.absorption.probes import is_in_backbone
from slab_det.fusion.channels import ChannelUnit, output_parameters


@dataclass
class Estimates:
    """What the channels of a unit are estimated to cost.

    Attributes:
        unit: The unit.
        counts: The numbers of channels that may stay, from all of them down.
        losses: Estimated loss for each of them; the first is 0. In the backbone: the variance of the error in the
            residual stream, over the variance of the stream. In a head: the same of its outputs. Of maps: the same of
            the outputs of each layer that reads them, summed over the layers.
        order: The order in which the channels go; None for maps, which lose components.
    """

    unit: ChannelUnit
    counts: list[int]
    losses: list[float]
    order: Tensor | None = None


@dataclass(frozen=True)
class Price:
    """The share of the AP that is lost with channels of a kind of layers, by the sum of their estimated losses.

    Attributes:
        points: (estimate, share of the AP) of drafts; by default, a share is what was estimated.
    """

    points: Sequence[tuple[float, float]] = ((1.0, 1.0),)

    @cached_property
    def corners(self) -> list[tuple[float, float]]:
        """The corners of the largest convex function that is 0 at 0 and nowhere above the points."""
        corners = [(0.0, 0.0)]
        while ahead := [point for point in self.points if point[0] > corners[-1][0]]:
            x, y = corners[-1]
            corners.append(min(ahead, key=lambda point: ((point[1] - y) / (point[0] - x), -point[0])))
        return corners

    def __call__(self, estimate: float) -> float:
        """That function; beyond the last corner it goes on straight."""
        lines = (
            y + (estimate - x) * (next_y - y) / (next_x - x) for (x, y), (next_x, next_y) in pairwise(self.corners)
        )
        return max(lines, default=0.0)


def layer_kind(model: nn.Module, unit: ChannelUnit) -> str:
    """The kind of a unit: 'FFN' or 'attention' of a backbone, the name of the unit in a neck, or of a head, without a
    number."""
    if unit.maps:
        return unit.name
    if is_in_backbone(model, unit.name):
        return 'attention' if unit.tokens else 'FFN'
    return re.sub(r'\.\d+$', '', unit.owner)


def possible_counts(unit: ChannelUnit) -> list[int]:
    """The numbers of channels that may stay, from all down: multiples of 8, in whole groups of a group norm; in an
    attention, multiples of 16, 8 or 4 per head."""
    # A kernel for 24 of 32 channels per head is hardly faster than one for 32.
    width = unit.count // unit.heads
    step = math.lcm(8, unit.group) if not unit.tokens else 16 if width > 16 else 8 if width > 8 else 4
    return [unit.count, *(unit.heads * left for left in reversed(range(step, width, step)))]


@torch.no_grad()
def estimate_losses(model: nn.Module, unit: ChannelUnit, observed: Observed) -> Estimates | None:
    """Estimates for a unit, each as if nothing else were removed; None if too few tokens reach the unit."""
    if any(part.count < len(part.xx) for part in observed.channels):
        return None
    counts = possible_counts(unit)
    if unit.maps:
        (maps,) = observed.channels
        losses = find_components(maps, measure_sensitivity(model, unit, maps)).losses
        return Estimates(unit, counts, [0.0, *map(float, losses[counts[1:]])])
    # The outputs of the readers, which are linear in the channels.
    parts = [
        with_outputs(part, [*map(model.get_submodule, names)])
        for part, names in zip(observed.channels, unit.readers_of_levels, strict=True)
    ]
    if observed.stream.count:
        scale = sum(observed.stream.variance() * part.count for part in parts)
    else:
        # Outputs of several layers, such as classes and boxes, have different scales.
        parts = [part.divide_target(part.yy.clamp(min=1e-300).sqrt()) for part in parts]
        scale = sum(len(part.yy) for part in parts)
    joint = join_channels(parts, unit.count)
    order, added = rank_channels(joint, unit.heads, len(joint.xx) // unit.count * unit.group)
    losses = [0.0, *(float(added[(unit.count - count) // unit.group - 1]) / scale for count in counts[1:])]
    if not unit.tokens:
        return Estimates(unit, counts, losses, order)
    (values,) = parts
    projection = output_parameters(model.get_submodule(unit.writers[0]))
    lost = lost_logits(observed.queries, observed.keys, *projection, unit.heads)
    # A small error e of the logits multiplies the weights of the values by about 1 + e.
    squares = lost.clamp(min=0) * model.get_submodule(unit.owner).qk_scale ** 2
    errors = [float(squares[:, count // unit.heads].clamp(max=1.0).mean()) for count in counts[1:]]
    by_rank = (error * float(values.yy.sum()) / scale for error in errors)
    losses = [0.0, *(loss + more for loss, more in zip(losses[1:], by_rank, strict=True))]
    return Estimates(unit, counts, losses, order)
