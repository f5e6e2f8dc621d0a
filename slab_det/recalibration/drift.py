"""Statistics drift: by how much the running statistics of offline norms moved, in training or by a recalibration."""

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
    """Distances of statistics after to those before.

    Attributes:
        mean: |mean after - mean before| / sigma before, averaged over all channels of all norms.
        largest_mean: The largest of them.
        log_var: |log variance after - log variance before|, averaged; eps is part of the variance.
        largest_log_var: The largest of them.
    """

    mean: float
    largest_mean: float
    log_var: float
    largest_log_var: float

    @property
    def largest(self) -> float:
        """The largest of any kind; NaN where one is."""
        return torch.tensor([self.largest_mean, self.largest_log_var], dtype=torch.float64).max().item()

    def to_dict(self) -> dict[str, float | None]:
        """For JSON: None for what is not finite."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


def copy_statistics(norms: Mapping[str, OfflineNorm]) -> Statistics:
    """Copies of the statistics that the norms have now."""
    return {name: tuple(values.clone() for values in norm.statistics()) for name, norm in norms.items()}


def statistics_drift(norms: Mapping[str, OfflineNorm], before: Statistics) -> Drift:
    """How far the statistics that ``norms`` have now are from ``before``.

    Args:
        norms: At least one, all on one device.
        before: Of the same norms, from :func:`copy_statistics`.
    """
    distances = [_distances(norm, *before[name]) for name, norm in norms.items()]
    means, log_vars = (torch.cat(values) for values in zip(*distances, strict=True))
    return Drift(*torch.stack([means.mean(), means.max(), log_vars.mean(), log_vars.max()]).tolist())


def largest_drifts(norms: Mapping[str, OfflineNorm], before: Statistics) -> dict[str, float]:
    """``Drift.largest`` of each norm by itself, by its name; arguments as of :func:`statistics_drift`."""
    largest = [torch.cat(_distances(norm, *before[name])).max() for name, norm in norms.items()]
    return dict(zip(norms, torch.stack(largest).tolist(), strict=True))


def _distances(norm: OfflineNorm, old_mean: Tensor, old_var: Tensor) -> tuple[Tensor, Tensor]:
    """Of means, in sigmas, and of log variances; (C,) each."""
    # A norm without mean keeps none, and a var that is not the variance: what it made of the moments counts.
    old_mean, old_var, mean, var = (values.double() for values in (old_mean, old_var, *norm.statistics()))
    return (
        (mean - old_mean).abs() / (old_var + norm.eps).sqrt(),
        ((var + norm.eps) / (old_var + norm.eps)).log().abs(),
    )
