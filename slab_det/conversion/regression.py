"""Ridge regression of one layer on another, from sums over tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Strengths of the pull towards the prior, in standardised coordinates.
RIDGES = tuple(10.0**power for power in range(-6, 3))
# Where no batch is held out to choose it.
DEFAULT_RIDGE = 1e-2
CHUNK = 4096


class CrossMoments:
    """Count, means and scatters of inputs x and targets y over tokens, in float64.

    Attributes:
        count: Tokens so far.
        mean_x, mean_y: Means, (C_x,) and (C_y,); None before the first token.
        xx: Sum over tokens of ``(x - mean_x) (x - mean_x)^T``, (C_x, C_x).
        xy: The same of x and y, (C_x, C_y).
        yy: Of y only the diagonal, (C_y,).
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean_x: Tensor | None = None
        self.mean_y: Tensor | None = None
        self.xx: Tensor | None = None
        self.xy: Tensor | None = None
        self.yy: Tensor | None = None

    def add(self, x: Tensor, y: Tensor) -> None:
        """Adds tokens, (..., C_x) and (..., C_y)."""
        # In pieces: whole maps in float64 would be larger than all that the model holds.
        for x_part, y_part in zip(x.flatten(0, -2).split(CHUNK), y.flatten(0, -2).split(CHUNK), strict=True):
            part = CrossMoments()
            part.count = len(x_part)
            x_part, y_part = x_part.double(), y_part.double()
            part.mean_x, part.mean_y = x_part.mean(0), y_part.mean(0)
            x_part, y_part = x_part - part.mean_x, y_part - part.mean_y
            part.xx, part.xy, part.yy = x_part.T @ x_part, x_part.T @ y_part, y_part.square().sum(0)
            self.merge(part)

    def merge(self, other: CrossMoments) -> None:
        """Adds the tokens of ``other`` by the formula of Chan, Golub and LeVeque (1979)."""
        if self.count == 0 or other.count == 0:
            if other.count:
                vars(self).update(vars(other))
            return
        count = self.count + other.count
        x, y = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        weight = self.count * other.count / count
        self.xx += other.xx + weight * x.outer(x)
        self.xy += other.xy + weight * x.outer(y)
        self.yy += other.yy + weight * y.square()
        self.mean_x = self.mean_x + x * (other.count / count)
        self.mean_y = self.mean_y + y * (other.count / count)
        self.count = count

    def about_zero(self) -> CrossMoments:
        """Sums of products about zero instead of the means: their fits have no shift."""
        other = CrossMoments()
        if self.count:
            x, y = self.mean_x, self.mean_y
            other.count, other.mean_x, other.mean_y = self.count, torch.zeros_like(x), torch.zeros_like(y)
            other.xx = self.xx + self.count * x.outer(x)
            other.xy = self.xy + self.count * x.outer(y)
            other.yy = self.yy + self.count * y.square()
        return other

    def unexplained(self, fit: Affine) -> float:
        """The share of the variance of y that ``fit`` leaves: 0 is none, and more than 1 is worse than a constant."""
        matrix = fit.matrix
        squares = self.yy.sum() - 2 * (matrix.T * self.xy).sum() + ((matrix @ self.xx) * matrix).sum()
        offset = self.mean_y - matrix @ self.mean_x - fit.shift
        return float((squares + self.count * offset.square().sum()) / self.yy.sum().clamp(min=1e-300))


class Affine(NamedTuple):
    """``y = matrix x + shift``, (C_y, C_x) and (C_y,), in float64."""

    matrix: Tensor
    shift: Tensor


def diagonal_fit(moments: CrossMoments) -> Affine:
    """The best map ``y_c = s_c (x_c - mean over channels of x) + t_c``, which a LayerNorm of constant scale is.

    For each channel, with ``z = x - mean over channels of x``, ``s = Cov(z, y) / Var(z)`` and ``t = E y - s E z``.
    """
    channels = len(moments.mean_x)
    centre = torch.eye(channels, dtype=torch.float64, device=moments.xx.device) - 1 / channels
    var = (centre @ moments.xx @ centre).diagonal()
    # Rounding noise of a constant channel must not become a slope.
    varies = var > 1e-12 * (moments.count * moments.mean_x.square() + moments.xx.diagonal())
    slope = torch.where(varies, (centre @ moments.xy).diagonal() / var.where(varies, 1.0), 0.0)
    return _with_shift(moments, slope[:, None] * centre)


def ridge_fits(moments: CrossMoments, prior: Tensor, ridges: tuple[float, ...] = RIDGES) -> list[Affine]:
    """For each strength r the map that minimises ``E |y - M x - t|^2 + r |(M - prior) diag(sigma)|^2``.

    sigma are the standard deviations of x. In standardised coordinates, with G = E z z^T,
    ``M = (E y z^T + r prior) (G + r)^-1``: one matrix for all layers that read y, because the fit is linear in y.

    Args:
        moments: Of at least two tokens.
        prior: (C_y, C_x).
        ridges: The strengths.
    """
    var = moments.xx.diagonal() / moments.count
    # A channel that is constant but for rounding keeps the prior.
    varies = var > 1e-12 * (moments.mean_x.square() + var)
    sigma = var.where(varies, 1.0).sqrt()
    gram = torch.where(varies[:, None] & varies, moments.xx / moments.count / sigma.outer(sigma), 0.0)
    target = torch.where(varies[:, None], moments.xy / moments.count / sigma[:, None], 0.0).T
    values, vectors = torch.linalg.eigh(gram)
    target, start = target @ vectors, (prior * sigma) @ vectors
    fits = (((target + r * start) / (values.clamp(min=0) + r)) @ vectors.T / sigma for r in ridges)
    return [_with_shift(moments, matrix) for matrix in fits]


def choose_fit(moments: CrossMoments, held_out: CrossMoments, prior: Tensor) -> tuple[Affine, float]:
    """The fit whose ridge leaves least of ``held_out``, and that ridge; ``DEFAULT_RIDGE`` where nothing is held out."""
    if held_out.count == 0:
        return ridge_fits(moments, prior, (DEFAULT_RIDGE,))[0], DEFAULT_RIDGE
    fits = dict(zip(RIDGES, ridge_fits(moments, prior), strict=True))
    ridge = min(fits, key=lambda ridge: held_out.unexplained(fits[ridge]))
    return fits[ridge], ridge


def _with_shift(moments: CrossMoments, matrix: Tensor) -> Affine:
    return Affine(matrix, moments.mean_y - matrix @ moments.mean_x)
