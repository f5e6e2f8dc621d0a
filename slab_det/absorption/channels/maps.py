"""Channels of the maps of a neck, which several heads read: those that go become combinations of those that stay."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slab_det.absorption.channels.elimination import rank_channels
from slab_det.absorption.moments import CrossMoments
from slab_det.fusion.channels import ChannelUnit, input_weight, keep_channels, set_input_weight


@torch.no_grad()
def sensitivity(model: nn.Module, unit: ChannelUnit, moments: CrossMoments) -> Tensor:
    """How much an error of the maps changes the outputs of the readers, (C, C).

    With W_p the weight of a reader at position p of its kernel or of its region, and S the second moments of the maps,
    the outputs of the reader have the variances ``v = sum_p diag(W_p S W_p^T)``, if positions are independent. An
    error with the second moments E then has the share ``trace(Q E)`` of these variances, the mean over the outputs and
    the sum over the readers, with ``Q = sum over readers of sum_p W_p^T diag(1 / v) W_p / number of outputs``.

    Args:
        model: The student.
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
def rank_maps(moments: CrossMoments, sensitivity: Tensor) -> tuple[Tensor, Tensor]:
    """Orders the channels of the maps by what the readers lose; :func:`rank_channels` describes the result.

    The second value is the share of the variance of the readers' outputs, see :func:`sensitivity`.
    """
    about_zero = moments.about_zero()
    values, vectors = torch.linalg.eigh(sensitivity)
    # The squared error of the target root(Q) x is trace(Q E).
    about_zero.xy = about_zero.xx @ (vectors * values.clamp(min=0).sqrt())
    order, added = rank_channels(about_zero)
    return order, added / moments.count


@torch.no_grad()
def combine_channels(
    model: nn.Module, unit: ChannelUnit, kept: int, moments: CrossMoments, order: Tensor
) -> tuple[Tensor, float]:
    """Removes channels of the maps; the readers take the others for them, by one regression for all levels.

    The regression has no shift, because the zeros around a map have none.

    Args:
        model: The student, changed in place.
        unit: The channels of the maps.
        kept: Number of channels that stay.
        moments: Sums of the maps about their means, as x.
        order: The order in which the channels go.

    Returns:
        The indices of the channels that stay, and the share of the variance of the readers' outputs that is lost, see
        :func:`sensitivity`, the mean over readers.
    """
    weights, stay, about_zero = sensitivity(model, unit, moments), order[-kept:].sort().values, moments.about_zero()
    matrix = about_zero.project(torch.eye(unit.count, device=stay.device), stay)
    matrix[stay] = torch.eye(kept, dtype=matrix.dtype, device=stay.device)
    for layer in map(model.get_submodule, unit.readers):
        weight = input_weight(layer).double().unflatten(1, (unit.count, -1))
        weight[:, stay] = torch.einsum('ocp,ck->okp', weight, matrix)
        set_input_weight(layer, weight.flatten(1))
    keep_channels(model, unit, stay)
    rest = torch.eye(unit.count, dtype=matrix.dtype, device=stay.device)
    rest[:, stay] -= matrix
    return stay, float((weights * (rest @ about_zero.xx @ rest.T)).sum() / moments.count / len(unit.readers))
