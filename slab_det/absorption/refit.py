"""Fits layers of a student again, so that their outputs approach the teacher's, and prunes the channels they read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from slab_det.absorption.regression import (
    Affine,
    CrossMoments,
    choose_fit,
    join_channels,
    measured_part,
    rank_channels,
)
from slab_det.fusion.channels import ChannelUnit, columns_of, input_weight, keep_channels, set_input_weight


@torch.no_grad()
def refit(layer: nn.Linear | nn.Conv2d, moments: CrossMoments, held_out: CrossMoments) -> float:
    """Adds to a layer the affine map of its input that best explains the error of its output or of the stream.

    Args:
        layer: A linear layer, or a convolution without groups, (C_out, C_in, ...); changed in place.
        moments: Sums to fit: the inputs of the layer, as columns of its flattened weight, and the error, (C_out,).
        held_out: The same of held-out images, which choose the ridge.

    Returns:
        The mean squared error after the fit over the mean squared error before; 1 if the layer stays as it is, also
        where no token, such as a region with an object, reached it.
    """
    if not moments.count:
        return 1.0
    if layer.bias is None:
        # A model rebuilt from its config would have no bias here, so the fit has no shift.
        moments, held_out = moments.about_zero(), held_out.about_zero()
    fit = choose_fit(moments, held_out, torch.zeros_like(moments.xy.T))
    judge = measured_part(moments, held_out)
    before, after = judge.mean_square(), judge.unexplained(fit) * judge.variance()
    if after >= before:
        return 1.0
    layer.weight += fit.matrix.view_as(layer.weight)
    if layer.bias is not None:
        layer.bias += fit.shift
    return after / before


@torch.no_grad()
def prune_and_refit(
    model: nn.Module, unit: ChannelUnit, kept: int, levels: Sequence[tuple[CrossMoments, CrossMoments]]
) -> float:
    """Removes hidden channels and refits the layers that read them.

    Args:
        model: The student.
        unit: The channels.
        kept: Number of channels to leave.
        levels: The sums to fit and to hold out, for the readers of each level: the channels and the readers' outputs.

    Returns:
        The squared error over the variance of the targets, the mean over levels.
    """
    readers = [[*map(model.get_submodule, names)] for names in unit.readers_of_levels]
    weights = [torch.cat([*map(input_weight, layers)]).double() for layers in readers]
    # Outputs of several layers, such as classes and boxes, have different scales.
    apart = len(unit.readers) > 1
    scales = [moments.deviation() if apart else torch.ones_like(moments.mean_y) for moments, _ in levels]
    weights = [weight / scale[:, None] for weight, scale in zip(weights, scales, strict=True)]
    targets = [[part.divide_target(scale) for part in parts] for parts, scale in zip(levels, scales, strict=True)]
    fitted = [
        [_without_bias(part, layers, scale) for part in parts]
        for parts, layers, scale in zip(targets, readers, scales, strict=True)
    ]
    joint = join_channels([moments for moments, _ in fitted], unit.count)
    order, _ = rank_channels(joint, unit.heads, len(joint.xx) // unit.count * unit.group)
    stay = columns_of(order[-kept // unit.group :].sort().values, unit.group)
    fits, errors = [], []
    for weight, target, (moments, held_out), layers, scale in zip(
        weights, targets, fitted, readers, scales, strict=True
    ):
        inputs = columns_of(stay, weight.shape[1] // unit.count)
        # The channels that stay take over the work of those that go, unless there are too few tokens to tell how.
        priors = moments.project(weight, inputs), weight[:, inputs]
        moments, held_out = moments.select(inputs), held_out.select(inputs)
        judge = measured_part(moments, held_out)
        fit = min((choose_fit(moments, held_out, prior) for prior in priors), key=judge.unexplained)
        fits.append(Affine(fit.matrix * scale[:, None], fit.shift * scale))
        shift = fit.shift + _fixed_bias(layers, scale)
        errors.append(measured_part(*target).select(inputs).unexplained(fit._replace(shift=shift)))
    keep_channels(model, unit, stay)
    for fit, layers in zip(fits, readers, strict=True):
        sizes = [len(input_weight(layer)) for layer in layers]
        for layer, matrix, shift in zip(layers, fit.matrix.split(sizes), fit.shift.split(sizes), strict=True):
            set_input_weight(layer, matrix)
            if not _has_fixed_bias(layers):
                layer.bias.copy_(shift)
    return sum(errors) / len(errors)


def _has_fixed_bias(readers: Iterable[nn.Module]) -> bool:
    """Whether readers keep their bias: one has none, or is a transposed convolution, whose outputs share one."""
    return any(layer.bias is None or isinstance(layer, nn.ConvTranspose2d) for layer in readers)


def _fixed_bias(readers: Iterable[nn.Module], scale: Tensor) -> Tensor:
    """The bias of each output of readers, over its scale, where they keep it; otherwise 0."""
    biases = []
    for layer in readers:
        rows = len(input_weight(layer))
        fixed = _has_fixed_bias(readers) and layer.bias is not None
        biases.append(layer.bias.repeat_interleave(rows // len(layer.bias)) if fixed else scale.new_zeros(rows))
    return torch.cat(biases) / scale


def _without_bias(moments: CrossMoments, readers: Iterable[nn.Module], scale: Tensor) -> CrossMoments:
    """The sums for a fit of the readers: about zero and without the bias if they keep it."""
    if not _has_fixed_bias(readers):
        return moments
    return moments.subtract_from_target(_fixed_bias(readers, scale)).about_zero()
