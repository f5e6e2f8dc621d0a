"""Fits layers of a student again, so that their outputs approach the teacher's, and prunes the channels they read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from slab_det.absorption.elimination import join_channels, rank_channels, reduce_rank
from slab_det.absorption.moments import Affine, CrossMoments
from slab_det.absorption.regression import Split
from slab_det.fusion.channels import (
    ChannelUnit,
    columns_of,
    input_weight,
    keep_channels,
    output_parameters,
    set_input_weight,
)


@torch.no_grad()
def refit(layer: nn.Linear | nn.Conv2d, moments: Split) -> float:
    """Adds to a layer the affine map of its input that best explains the error of its output or of the stream.

    Args:
        layer: A linear layer, or a convolution without groups, (C_out, C_in, ...); changed in place.
        moments: Of the inputs of the layer, as columns of its flattened weight, and the error, (C_out,).

    Returns:
        The mean squared error after the fit over the mean squared error before; 1 if the layer stays as it is, also
        where no token, such as a region with an object, reached it.
    """
    if not moments.fitted.count:
        return 1.0
    if layer.bias is None:
        # A model rebuilt from its config would have no bias here, so the fit has no shift.
        moments = moments.map(CrossMoments.about_zero)
    fit, judge = moments.choose_fit(torch.zeros_like(moments.fitted.xy.T)), moments.measured
    before, after = judge.mean_square(), judge.unexplained(fit) * judge.variance()
    if after >= before:
        return 1.0
    layer.weight += fit.matrix.view_as(layer.weight)
    if layer.bias is not None:
        layer.bias += fit.shift
    return after / before


@torch.no_grad()
def prune_and_refit(
    model: nn.Module, unit: ChannelUnit, kept: int, moments: Sequence[Split], order: Tensor | None = None
) -> float:
    """Removes hidden channels and refits the layers that read them.

    Args:
        model: The student.
        unit: The channels.
        kept: Number of channels to leave.
        moments: Of the channels and the readers' outputs, for the readers of each level.
        order: The order in which channels go; by default that of :func:`rank_channels`.

    Returns:
        The squared error over the variance of the targets, the mean over levels.
    """
    # Outputs of several layers, such as classes and boxes, have different scales.
    apart = len(unit.readers) > 1
    levels = [
        _Level([*map(model.get_submodule, names)], part, apart)
        for names, part in zip(unit.readers_of_levels, moments, strict=True)
    ]
    if order is None:
        joint = join_channels([level.moments.fitted for level in levels], unit.count)
        order, _ = rank_channels(joint, unit.heads, len(joint.xx) // unit.count * unit.group)
    stay = columns_of(order[-kept // unit.group :].sort().values, unit.group)
    fits = [level.fit(columns_of(stay, level.weight.shape[1] // unit.count)) for level in levels]
    keep_channels(model, unit, stay)
    for level, (fit, _) in zip(levels, fits, strict=True):
        level.write(fit)
    return sum(error for _, error in fits) / len(fits)


def reduce_unit_rank(model: nn.Module, unit: ChannelUnit, kept: int, queries: CrossMoments, keys: CrossMoments) -> None:
    """Makes q and k of each head zero behind the channels that stay, with nearly the same logits.

    Args:
        model: The student, changed in place.
        unit: The channels of an attention.
        kept: Number of channels that stay, of all heads.
        queries, keys: Sums over the tokens that queries and keys come from, as x.
    """
    weight, bias = output_parameters(model.get_submodule(unit.writers[0]))
    padding = getattr(model.get_submodule(unit.owner), 'padding_qkv', None)
    reduce_rank(queries, keys, weight, bias, unit.heads, kept // unit.heads, padding)


class _Level:
    """The readers of one level, as one layer whose outputs are divided by their ``scale``.

    Attributes:
        bias: What the readers keep of their bias. They keep all of it if one has none, or is a transposed convolution,
            whose outputs share one; otherwise nothing.
        target: The sums for the outputs.
        moments: The sums for the fit of weight and bias: about zero and without the bias if the readers keep it.
    """

    def __init__(self, readers: list[nn.Module], moments: Split, apart: bool) -> None:
        self.readers, first = readers, moments.fitted
        self.scale = first.deviation() if apart else torch.ones_like(first.mean_y)
        self.weight = torch.cat([*map(input_weight, readers)]).double() / self.scale[:, None]
        self.keeps_bias = any(layer.bias is None or isinstance(layer, nn.ConvTranspose2d) for layer in readers)
        self.bias = torch.cat([*map(self._kept_bias, readers)]) / self.scale
        self.target = self.moments = moments.map(lambda part: part.divide_target(self.scale))
        if self.keeps_bias:
            self.moments = self.target.map(lambda part: part.subtract_from_target(self.bias).about_zero())

    def _kept_bias(self, layer: nn.Module) -> Tensor:
        rows = len(input_weight(layer))
        if not self.keeps_bias or layer.bias is None:
            return self.scale.new_zeros(rows)
        return layer.bias.repeat_interleave(rows // len(layer.bias))

    def fit(self, inputs: Tensor) -> tuple[Affine, float]:
        """Fits the readers of these columns; returns the fit and its squared error over the variance of the target."""
        # The channels that stay take over the work of those that go, unless there are too few tokens to tell how.
        priors = self.moments.fitted.project(self.weight, inputs), self.weight[:, inputs]
        moments = self.moments.map(lambda part: part.select(inputs))
        fit = min(map(moments.choose_fit, priors), key=moments.measured.unexplained)
        error = self.target.measured.select(inputs).unexplained(fit._replace(shift=fit.shift + self.bias))
        return Affine(fit.matrix * self.scale[:, None], fit.shift * self.scale), error

    def write(self, fit: Affine) -> None:
        """Writes a fit into the readers, which have lost channels."""
        sizes = [len(input_weight(layer)) for layer in self.readers]
        for layer, matrix, shift in zip(self.readers, fit.matrix.split(sizes), fit.shift.split(sizes), strict=True):
            set_input_weight(layer, matrix)
            if not self.keeps_bias:
                layer.bias.copy_(shift)
