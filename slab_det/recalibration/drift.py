"""Drift: by how much the running statistics of offline norms moved, in training or by a recalibration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from slab_det.norms import OfflineNorm

# Mean and variance, (C,) each, by the name of the norm.
Statistics = dict[str, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Drift:
    """Distances of the statistics after from the statistics before.

    Attributes:
        mean: |mean after - mean before| / sigma before, averaged over all channels of all norms.
        largest_mean: The largest such distance.
        log_var: |log variance after - log variance before|, averaged; eps is part of the variance.
        largest_log_var: The largest such distance.
    """

    mean: float
    largest_mean: float
    log_var: float
    largest_log_var: float

    @property
    def largest(self) -> float:
        """The larger of both maxima; NaN where one of them is NaN."""
        return torch.tensor([self.largest_mean, self.largest_log_var], dtype=torch.float64).max().item()

    def to_dict(self) -> dict[str, float | None]:
        """For JSON: None in place of a number that is not finite."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


def copy_statistics(norms: Mapping[str, OfflineNorm]) -> Statistics:
    """Copies of the statistics that the norms have now."""
    return {name: tuple(values.clone() for values in norm.statistics()) for name, norm in norms.items()}


def statistics_drift(norms: Mapping[str, OfflineNorm], before: Statistics) -> Drift:
    """How far the statistics that ``norms`` have now are from ``before``.

    Args:
        norms: At least one, all on one device.
        before: What :func:`copy_statistics` returned for these norms, or for more.
    """
    means, log_vars = [], []
    for name, norm in norms.items():
        # statistics(), not the moments found: a norm without mean keeps none, and its variance is the mean of x^2.
        old_mean, old_var, mean, var = (values.double() for values in (*before[name], *norm.statistics()))
        means.append((mean - old_mean).abs() / (old_var + norm.eps).sqrt())
        log_vars.append(((var + norm.eps) / (old_var + norm.eps)).log().abs())
    means, log_vars = torch.cat(means), torch.cat(log_vars)
    return Drift(*torch.stack([means.mean(), means.max(), log_vars.mean(), log_vars.max()]).tolist())
