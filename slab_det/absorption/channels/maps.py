"""Channels of the maps of a neck, which several heads read: the components that the heads need most stay."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from slab_det.absorption.channels.elimination import matrix_roots
from slab_det.absorption.moments import CrossMoments
from slab_det.fusion.channels import ChannelUnit, input_weight, keep_channels, output_parameters, set_input_weight


class Components(NamedTuple):
    """Components y = E x of maps x, those that the readers need most first, with ``D E x = x`` where readers look.

    Attributes:
        encoder: E, (C, C).
        decoder: D, (C, C).
        losses: The share of the variance of the readers' outputs, summed over readers, that is lost if only the first
            0, 1, ..., C components stay, (C + 1,); see :func:`measure_sensitivity`.
    """

    encoder: Tensor
    decoder: Tensor
    losses: Tensor


@torch.no_grad()
def measure_sensitivity(model: nn.Module, unit: ChannelUnit, moments: CrossMoments) -> Tensor:
    """How much an error of the maps changes the outputs of the readers, (C, C).

    With W_p the weight of a reader at position p of its kernel or of its region, and C the covariance of the maps, the
    outputs of the reader have the variances ``v = sum_p diag(W_p C W_p^T)``, if positions are independent. An error
    with the second moments E then has the share ``trace(Q E)`` of these variances, the mean over the outputs and the
    sum over the readers, with ``Q = sum over readers of sum_p W_p^T diag(1 / v) W_p / number of outputs``. Readers of
    one level each, inside an FPN, are treated as if they read all levels.

    Args:
        model: The teacher, or a copy of it.
        unit: The channels of the maps, before any goes.
        moments: Sums of the maps about their means, as x.
    """
    total = torch.zeros_like(moments.xx)
    for layer in map(model.get_submodule, unit.readers):
        weight = input_weight(layer).double().unflatten(1, (unit.count, -1))
        products = torch.einsum('cd,odp->ocp', moments.xx / moments.count, weight)
        variance = (products * weight).sum((1, 2)).clamp(min=1e-300)
        parts = (weight / (variance * len(weight)).sqrt()[:, None, None]).movedim(1, 0).flatten(1)
        total += parts @ parts.T
    return total


@torch.no_grad()
def find_components(moments: CrossMoments, sensitivity: Tensor) -> Components:
    """Finds the components of the maps of which any first K are the K combinations that lose least.

    With ``S = E x x^T`` and Q the sensitivity, the error of the best ``A B x`` of rank K is the sum of all
    but the K largest eigenvalues of ``Q^1/2 S Q^1/2 = V diag(l) V^T``, with ``B = V_K^T Q^1/2`` and
    ``A = S Q^1/2 V_K diag(1 / l_K)``. The components are scaled to the mean variance of the maps, so that int8 rounds
    each as finely as the maps.
    """
    second = moments.about_zero().xx / moments.count
    root, _ = matrix_roots(sensitivity)
    values, vectors = torch.linalg.eigh(root @ second @ root)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    varies = values > 1e-12 * values[0]
    # Larger rows would leave the range of float16.
    scale = (second.diagonal().mean() / values.clamp(min=max(1e-6 * float(values[0]), 1e-300))).sqrt()
    decoder = torch.where(varies, second @ root @ vectors / values / scale, 0.0)
    losses = torch.nn.functional.pad(values.flip(0).cumsum(0).flip(0), (0, 1))
    return Components(scale[:, None] * (root @ vectors).T, decoder, losses)


@torch.no_grad()
def keep_components(model: nn.Module, unit: ChannelUnit, kept: int, moments: CrossMoments) -> tuple[Tensor, float]:
    """Leaves the first components of the maps in place of their channels: writers encode, and readers decode.

    A neck is linear in its outputs, and so are its readers. Nothing has a shift, because the zeros around a map have
    none.

    Args:
        model: The student, changed in place.
        unit: The channels of the maps.
        kept: Number of components that stay.
        moments: Sums of the maps about their means, as x.

    Returns:
        The encoder of the components that stay, (K, C), and the share of the variance of the readers' outputs that is
        lost, see :func:`measure_sensitivity`, the mean over readers.
    """
    components = find_components(moments, measure_sensitivity(model, unit, moments))
    encoder, decoder = components.encoder[:kept], components.decoder[:, :kept]
    for layer in map(model.get_submodule, unit.readers):
        weight = input_weight(layer).double().unflatten(1, (unit.count, -1))
        weight[:, :kept] = torch.einsum('ocp,ck->okp', weight, decoder)
        set_input_weight(layer, weight.flatten(1))
    for layer in map(model.get_submodule, unit.writers):
        for values in filter(torch.is_tensor, output_parameters(layer)):
            values[:kept] = torch.einsum('kc,c...->k...', encoder, values.double()).to(values.dtype)
    keep_channels(model, unit, unit.first(kept))
    return encoder, float(components.losses[kept]) / len(unit.readers)
