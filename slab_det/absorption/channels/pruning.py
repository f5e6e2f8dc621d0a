"""Removes hidden channels of a student, and fits the layers that read them to the teacher's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slab_det.absorption.channels.elimination import RIDGE, reduce_rank
from slab_det.absorption.channels.maps import keep_components
from slab_det.absorption.channels.observed import Observed
from slab_det.absorption.moments import Affine, CrossMoments
from slab_det.absorption.regression import ridge_fits
from slab_det.fusion.channels import (
    ChannelUnit,
    columns_of,
    find_channels,
    input_weight,
    keep_channels,
    output_parameters,
    set_input_weight,
)

# Keeps a component without variance as it is.
TINY_RIDGE = 1e-9


class Pruned(NamedTuple):
    """A unit that lost channels.

    Attributes:
        error: The squared error of the outputs of its readers, over the variance of the residual stream behind them, or
            of the outputs in neck and heads; of maps before the readers are fitted.
        encoder: What the channels of maps now are, combinations of those before, (K, C); None for other units.
    """

    error: float
    encoder: Tensor | None = None


@torch.no_grad()
def prune_channels(
    model: nn.Module,
    counts: Mapping[str, int],
    observed: Callable[[str], Observed],
    orders: Mapping[str, Tensor],
) -> dict[str, Pruned]:
    """Removes channels of a copy of the teacher, and fits the layers that read them, without running it.

    Every fit takes the channels that the teacher computes, so no layer corrects errors of the layers before it.
    Students whose layers did lost as much AP, and took a hundred times longer.

    Args:
        model: The copy, changed in place.
        counts: Number of channels to leave in each unit that loses some, by its name.
        observed: Returns what the teacher computes around the unit with a name.
        orders: The order in which the channels go, by the name of each unit that is no map.

    Returns:
        What became of each unit, by its name.
    """
    units, found = find_channels(model), {}
    # Maps go before hidden channels, and maps inside an FPN before its outputs: the share of an error that
    # keep_components gives refers to all outputs of the readers.
    for name in sorted(counts, key=lambda name: (not units[name].maps, not units[name].is_per_level)):
        unit, kept, seen = units[name], counts[name], observed(name)
        if unit.maps:
            found[name] = _reduce_maps(model, unit, kept, seen)
            continue
        if unit.tokens:
            weight, bias = output_parameters(model.get_submodule(unit.writers[0]))
            padding = getattr(model.get_submodule(unit.owner), 'padding_qkv', None)
            reduce_rank(seen.queries, seen.keys, weight, bias, unit.heads, kept // unit.heads, padding)
        found[name] = _remove_hidden(model, unit, kept, seen, orders[name])
    return found


def with_outputs(inputs: CrossMoments, layers: Sequence[nn.Module]) -> CrossMoments:
    """Returns the sums over inputs x, (C,), with the outputs y, (C_y,), of layers that all read x as the target.

    The outputs are without their biases, and the sums about zero, unless each output has a bias that can be fitted.
    """
    weight = torch.cat([*map(input_weight, layers)]).double()
    if not _have_free_biases(layers):
        return inputs.with_target(weight).about_zero()
    return inputs.with_target(weight, torch.cat([layer.bias.double() for layer in layers]))


def _have_free_biases(layers: Sequence[nn.Module]) -> bool:
    """Whether layers have a bias for each of their outputs: those of a transposed convolution share one."""
    return not any(layer.bias is None or isinstance(layer, nn.ConvTranspose2d) for layer in layers)


def _remove_hidden(model: nn.Module, unit: ChannelUnit, kept: int, seen: Observed, order: Tensor) -> Pruned:
    """Removes channels between layers; see :func:`prune_channels`."""
    stay = columns_of(order[-kept // unit.group :].sort().values, unit.group)
    levels = [[*map(model.get_submodule, names)] for names in unit.readers_of_levels]
    fits, errors = [], []
    for layers, inputs in zip(levels, seen.channels, strict=True):
        target, weight = with_outputs(inputs, layers), torch.cat([*map(input_weight, layers)])
        columns = columns_of(stay, weight.shape[1] // unit.count)
        fits.append(_fit(target.select(columns), weight[:, columns]))
        squares = target.select(columns).squared_errors(fits[-1])
        if seen.stream.count:
            # Of images of a pixel, the stream may have no variance.
            errors.append(squares.sum() / target.count / max(seen.stream.variance(), 1e-300))
        else:
            # Outputs of several layers, such as classes and boxes, have different scales.
            errors.append((squares / target.yy.clamp(min=1e-300)).mean())
    keep_channels(model, unit, stay)
    for layers, fit in zip(levels, fits, strict=True):
        _write(layers, fit)
    return Pruned(float(sum(errors)) / len(errors))


def _fit(moments: CrossMoments, prior: Tensor, ridge: float = RIDGE) -> Affine:
    """The fit with a ridge towards ``prior``, the weights that the teacher has for the channels that stay."""
    return next(ridge_fits(moments, prior.double(), (ridge,)))


def _write(layers: list[nn.Module], fit: Affine) -> None:
    """Writes a fit of layers as one layer, which have lost channels."""
    sizes, free = [len(input_weight(layer)) for layer in layers], _have_free_biases(layers)
    for layer, matrix, shift in zip(layers, fit.matrix.split(sizes), fit.shift.split(sizes), strict=True):
        set_input_weight(layer, matrix)
        if free:
            layer.bias.copy_(shift)


def _reduce_maps(model: nn.Module, unit: ChannelUnit, kept: int, seen: Observed) -> Pruned:
    """Leaves components of a neck's maps, and fits the layers that read them where their inputs were observed."""
    # The ridge is added before channels are combined: in components it would exceed the variance of the last ones.
    targets = {
        name: with_outputs(part.with_ridge(RIDGE), [model.get_submodule(name)])
        for name, part in seen.readers.items()
        if part.count
    }
    encoder, error = keep_components(model, unit, kept, seen.channels[0])
    for name, target in targets.items():
        layer = model.get_submodule(name)
        _write([layer], _fit(target.combine(encoder), input_weight(layer), ridge=TINY_RIDGE))
    return Pruned(error, encoder)
