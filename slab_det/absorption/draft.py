"""make_draft: a student in seconds, fitted on the teacher's inputs alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from slab_det.absorption.maps import combine_channels
from slab_det.absorption.moments import CrossMoments
from slab_det.absorption.observed import Observed
from slab_det.absorption.refit import prune_and_refit, reduce_unit_rank
from slab_det.absorption.regression import DEFAULT_RIDGE, Split, ridge_fits
from slab_det.fusion.channels import ChannelUnit, columns_of, find_channels, input_weight, set_input_weight


@torch.no_grad()
def make_draft(
    model: nn.Module, counts: Mapping[str, int], observed: Mapping[str, Observed], orders: Mapping[str, Tensor]
) -> nn.Module:
    """Removes channels of a copy of the teacher and fits the layers that read them, without running it.

    Every fit takes the teacher's channels, where the fits of :func:`~slab_det.absorption.student.make_student` take
    those that the student computes, so no layer corrects errors of the layers before it.

    Args:
        model: The copy, changed in place.
        counts: Number of channels to leave in each unit that loses some, by its name.
        observed: What the teacher computes around each unit.
        orders: The order in which the channels of each unit go.

    Returns:
        The copy, without a report.
    """
    units = find_channels(model)
    # Layers that read maps write hidden channels of heads: they are fitted while they have all of them.
    for name in sorted(counts, key=lambda name: not units[name].maps):
        unit, seen = units[name], observed[name]
        if unit.maps:
            _remove_maps(model, unit, counts[name], seen)
            continue
        if unit.tokens:
            reduce_unit_rank(model, unit, counts[name], seen.queries, seen.keys)
        outputs = [
            with_outputs(part, [*map(model.get_submodule, names)])
            for names, part in zip(unit.readers_of_levels, seen.channels, strict=True)
        ]
        prune_and_refit(model, unit, counts[name], [Split(part, CrossMoments()) for part in outputs], orders[name])
    return model


def with_outputs(inputs: CrossMoments, layers: Sequence[nn.Module]) -> CrossMoments:
    """Returns the sums with the outputs of some layers, which are affine in their common inputs, as the target."""
    weights, biases = [], []
    for layer in layers:
        weights.append(input_weight(layer).double())
        bias = weights[-1].new_zeros(1) if layer.bias is None else layer.bias.detach().double()
        # A transposed convolution has one bias for all positions of its kernel.
        biases.append(bias.repeat_interleave(len(weights[-1]) // len(bias)))
    return inputs.with_target(torch.cat(weights), torch.cat(biases))


def _remove_maps(model: nn.Module, unit: ChannelUnit, kept: int, seen: Observed) -> None:
    """Removes channels of a neck's maps, and fits the layers that read the maps where their inputs were observed."""
    outputs = {
        name: with_outputs(part, [model.get_submodule(name)]) for name, part in seen.readers.items() if part.count
    }
    (maps,) = seen.channels
    stay, _ = combine_channels(model, unit, kept, Split(maps, CrossMoments()))
    for name, part in outputs.items():
        layer = model.get_submodule(name)
        prior = input_weight(layer).double()
        columns = columns_of(stay, prior.shape[1] // kept)
        fit = next(ridge_fits(part.select(columns), prior, (DEFAULT_RIDGE,)))
        set_input_weight(layer, fit.matrix)
        if layer.bias is not None:
            layer.bias.copy_(fit.shift)
