"""Merges hidden channels of FFNs into one linear map, on the way of an absorption."""

from __future__ import annotations

import math

import torch
from torch import nn

from slab_det.absorption.regression import CrossMoments, choose_fit, measured_part, rank_channels
from slab_det.absorption.report import FFNAbsorption
from slab_det.fusion.folds import CannotFold
from slab_det.fusion.merged_ffn import find_ffn_layers, merge_ffn


def count_hidden(ffn: nn.Module, share: float) -> int:
    """Hidden channels of an FFN that stay, in steps of 8, which matrix products are made for.

    Args:
        ffn: The FFN.
        share: Share of the hidden channels to be merged.

    Raises:
        CannotFold: If the FFN is left alone; with the reason.
    """
    fc1, _, _ = find_ffn_layers(ffn)
    channels, inputs = fc1.weight.shape[:2]
    hidden = min(channels, 8 * math.ceil((1 - share) * channels / 8 - 1e-9))
    if 2 * (channels - hidden) <= inputs:
        raise CannotFold('to merge so few channels would save nothing')
    return hidden


@torch.no_grad()
def merge_channels(
    student: nn.Module, name: str, hidden: int, moments: CrossMoments, held_out: CrossMoments, variance: float
) -> FFNAbsorption:
    """Merges most hidden channels of an FFN into one linear map, fitted with the rest to the teacher's stream.

    Args:
        student: Has the FFN, and is changed.
        name: Name of the FFN.
        hidden: Hidden channels that stay.
        moments: Moments of the FFN's input and hidden channels, and of what is missing of the stream.
        held_out: The same sums over images that no fit sees.
        variance: Variance of the teacher's stream, summed over channels.
    """
    judge = measured_part(moments, held_out)
    before = judge.mean_square() / variance
    fc1, _, fc2 = find_ffn_layers(student.get_submodule(name))
    channels, weight = fc1.weight.shape[1], fc2.weight.flatten(1)
    for part in {moments, judge}:
        # The target is everything that the FFN adds, not only what the old FFN misses.
        part.add_to_target(weight, fc2.bias)
    ranked = rank_channels(moments, channels) if hidden else torch.arange(0, device=weight.device)
    stay = ranked[len(ranked) - hidden :].sort().values
    chosen = torch.cat([torch.arange(channels, device=stay.device), channels + stay])
    moments, held_out, judge = (part.select(chosen) for part in (moments, held_out, judge))
    prior = torch.cat([weight.new_zeros(channels, channels), weight[:, stay]], 1).double()
    fit, ridge = choose_fit(moments, held_out, prior)
    new = merge_ffn(student, name, hidden, stay)
    new.linear.weight.copy_(fit.matrix[:, :channels])
    new.linear.bias.copy_(fit.shift)
    if hidden:
        new.fc2.weight.copy_(fit.matrix[:, channels:])
    after = judge.unexplained(fit) * judge.variance() / variance
    return FFNAbsorption(name, len(weight[0]), hidden, before=before, after=after, ridge=ridge)
