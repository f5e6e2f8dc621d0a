"""Ridge regression of one layer on another, from sums over tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

# Strengths of the pull towards the prior, in standardised coordinates. Weaker ones fit the images at hand better, with
# weights of some hundred that cancel. On a few other images, and in bfloat16, they do not cancel and the maps explode.
RIDGES = tuple(10.0**power for power in range(-4, 3))
# The strength where no batch is held out to choose one.
DEFAULT_RIDGE = 1e-2
# How much more than the best ridge a stronger one may leave.
SLACK = 1.05
# Tokens, on a CPU and on a GPU, where each piece costs some twenty launches.
CHUNK, GPU_CHUNK = 4096, 32768
# Rows of products that are computed together: those below the diagonal are copied.
BLOCK = 256


class CrossMoments:
    """Count, means and scatters of inputs x and targets y over tokens, summed in float64.

    Args:
        int8: Fits must bear that x is rounded to int8.

    Attributes:
        count: Tokens so far.
        mean_x, mean_y: Means, (C_x,) and (C_y,); None before the first token.
        xx: Sum over tokens of ``(x - mean_x) (x - mean_x)^T``, (C_x, C_x).
        xy: The same sum for x and y, (C_x, C_y).
        yy: The diagonal of the same sum for y, (C_y,).
        low, high: The range of x, with 0 in it.
    """

    def __init__(self, int8: bool = False) -> None:
        self.int8, self.count, self.low, self.high = int8, 0, 0.0, 0.0
        self.mean_x = self.mean_y = self.xx = self.xy = self.yy = None

    @property
    def rounding(self) -> float:
        """The variance of the error that x has in int8, or 0: 255 even steps for the range of all channels.

        The step counts twice, because x also brings the errors of the layers before.
        """
        return (2 * (float(self.high) - float(self.low)) / 255) ** 2 / 12 if self.int8 else 0.0

    def add(self, x: Tensor, y: Tensor) -> None:
        """Adds tokens, (..., C_x) and (..., C_y)."""
        if self.int8:
            # Tensors: a number would be read from the device for each batch.
            self.low, self.high = x.min().clamp(max=self.low), x.max().clamp(min=self.high)
        # float64 takes twice the time of float32 on a CPU; on a GPU, float32 may be TF32.
        dtype = torch.float64 if x.is_cuda or x.dtype == torch.float64 else torch.float32
        # In pieces: whole maps would be larger than all that the model holds, and sums in float32 too long.
        parts = (tokens.flatten(0, -2).split(GPU_CHUNK if x.is_cuda else CHUNK) for tokens in (x, y))
        for x_part, y_part in zip(*parts, strict=True):
            self._add_chunk(x_part.to(dtype), y_part.to(dtype))

    def _add_chunk(self, x: Tensor, y: Tensor) -> None:
        """The formula of Chan, Golub and LeVeque (1979), in place: xx is the largest tensor there is."""
        mean_x, mean_y = x.mean(0, dtype=torch.float64), y.mean(0, dtype=torch.float64)
        if self.count == 0:
            self.mean_x, self.mean_y = torch.zeros_like(mean_x), torch.zeros_like(mean_y)
            self.xx, self.xy = mean_x.new_zeros(len(mean_x), len(mean_x)), mean_x.new_zeros(len(mean_x), len(mean_y))
            self.yy = torch.zeros_like(mean_y)
        count = self.count + len(x)
        x, y = x - mean_x.to(x.dtype), y - mean_y.to(y.dtype)
        for start in range(0, len(mean_x), BLOCK):
            rows, rest = slice(start, start + BLOCK), slice(start + BLOCK, None)
            products = x[:, rows].T @ x[:, start:]
            self.xx[rows, start:] += products
            self.xx[rest, rows] += products[:, BLOCK:].T
            self.xy[rows] += x[:, rows].T @ y
        self.yy += y.square().sum(0)
        mean_x, mean_y = mean_x - self.mean_x, mean_y - self.mean_y
        weight = self.count * len(x) / count
        self.xx.addr_(mean_x, mean_x, alpha=weight)
        self.xy.addr_(mean_x, mean_y, alpha=weight)
        self.yy += weight * mean_y.square()
        self.mean_x += mean_x * (len(x) / count)
        self.mean_y += mean_y * (len(x) / count)
        self.count = count

    def about_zero(self) -> CrossMoments:
        """Sums of products about zero instead of the means: their fits have no shift."""
        other = copy(self)
        if self.count:
            x, y = self.mean_x, self.mean_y
            other.mean_x, other.mean_y = torch.zeros_like(x), torch.zeros_like(y)
            other.xx = self.xx + self.count * x.outer(x)
            other.xy = self.xy + self.count * x.outer(y)
            other.yy = self.yy + self.count * y.square()
        return other

    def add_to_target(self, weight: Tensor, bias: Tensor) -> None:
        """Makes the target ``y + weight x + bias``; weight (C_y, C_x), bias (C_y,)."""
        weight = weight.double()
        self.yy += 2 * (weight.T * self.xy).sum(0) + ((weight @ self.xx) * weight).sum(1)
        self.xy += self.xx @ weight.T
        self.mean_y += weight @ self.mean_x + bias.double()

    def select(self, channels: Tensor) -> CrossMoments:
        """The same sums over some channels of x, by their indices."""
        other = copy(self)
        if self.count:
            other.mean_x, other.xx, other.xy = self.mean_x[channels], self.xx[channels][:, channels], self.xy[channels]
        return other

    def unexplained(self, fit: Affine) -> float:
        """The share of the variance of y that ``fit`` leaves: 0 is none, and more than 1 is worse than a constant."""
        matrix = fit.matrix
        squares = self.yy.sum() - 2 * (matrix.T * self.xy).sum() + ((matrix @ self.xx) * matrix).sum()
        offset = self.mean_y - matrix @ self.mean_x - fit.shift
        return float((squares + self.count * offset.square().sum()) / self.yy.sum().clamp(min=1e-300))

    def variance(self) -> float:
        """The variance of y, summed over channels."""
        return float(self.yy.sum() / self.count)

    def mean_square(self) -> float:
        """The mean of ``|y|^2`` over tokens: what is left where nothing is fitted."""
        return float(self.yy.sum() / self.count + self.mean_y.square().sum())


def measured_part(moments: CrossMoments, held_out: CrossMoments) -> CrossMoments:
    """The tokens that say what a fit leaves: those held out, or all where there are none."""
    return held_out if held_out.count else moments


class Affine(NamedTuple):
    """``y = matrix x + shift``, (C_y, C_x) and (C_y,), in float64."""

    matrix: Tensor
    shift: Tensor


def diagonal_fit(moments: CrossMoments) -> Affine:
    """The best map ``y_c = s_c (x_c - mean over channels of x) + t_c``, which a LayerNorm of constant scale is.

    For each channel, with ``z = x - mean over channels of x``, ``s = Cov(z, y) / Var(z)`` and ``t = E y - s E z``.
    """
    channels = len(moments.mean_x)
    var = moments.xx.diagonal() - 2 * moments.xx.mean(0) + moments.xx.mean()
    # Rounding noise of a constant channel must not become a slope.
    varies = var > 1e-12 * (moments.count * moments.mean_x.square() + moments.xx.diagonal())
    cov = moments.xy.diagonal() - moments.xy.mean(0)
    slope = torch.where(varies, cov / var.where(varies, 1.0), 0.0)
    centre = torch.eye(channels, dtype=torch.float64, device=moments.xx.device) - 1 / channels
    return _with_shift(moments, slope[:, None] * centre)


def ridge_fits(moments: CrossMoments, prior: Tensor, ridges: tuple[float, ...] = RIDGES) -> Iterator[Affine]:
    """For each strength r the map that minimises
    ``E |y - M x - t|^2 + r |(M - prior) diag(sigma)|^2 + q |M - prior|^2``.

    sigma are the standard deviations of x, and q is ``moments.rounding``: M gains nothing by what is rounded away. In
    standardised coordinates, with G = E z z^T and the diagonal R = r + q / sigma^2,
    ``M = (E y z^T + prior R) (G + R)^-1``: one matrix for all layers that read y, because the fit is linear in y.

    Args:
        moments: Sums over at least two tokens.
        prior: (C_y, C_x).
        ridges: The strengths.
    """
    var = moments.xx.diagonal() / moments.count
    # A channel that is constant but for rounding keeps the prior.
    varies = var > 1e-12 * (moments.mean_x.square() + var)
    sigma = var.where(varies, 1.0).sqrt()
    gram = moments.xx / (sigma * moments.count)
    gram /= sigma[:, None]
    gram.masked_fill_(~(varies[:, None] & varies), 0.0)
    target = torch.where(varies[:, None], moments.xy / moments.count / sigma[:, None], 0.0)
    start = (prior * sigma).T
    for ridge in ridges:
        pull = ridge + moments.rounding / sigma.square()
        # One after the other: the matrices of an FFN are hundreds of MB, their eigenvectors the slowest of all.
        system = gram.clone()
        system.diagonal().add_(pull)
        factor = torch.linalg.cholesky(system)
        del system
        yield _with_shift(moments, (torch.cholesky_solve(target + pull[:, None] * start, factor) / sigma[:, None]).T)


def choose_fit(moments: CrossMoments, held_out: CrossMoments, prior: Tensor) -> Affine:
    """The fit of the strongest ridge before the share that it leaves of ``held_out`` exceeds ``SLACK`` times the least.

    The fit of ``DEFAULT_RIDGE`` where nothing is held out.
    """
    if held_out.count == 0:
        return next(ridge_fits(moments, prior, (DEFAULT_RIDGE,)))
    least = math.inf
    # From the weakest on: where what is left grows, every stronger one leaves more, and its factorisation is spared.
    for fit in ridge_fits(moments, prior):
        share = held_out.unexplained(fit)
        least = min(least, share)
        # A share of nothing may be rounded below 0.
        if share - least > (SLACK - 1) * abs(least):
            break
        chosen = fit
    return chosen


def rank_channels(moments: CrossMoments, ridge: float = RIDGES[0]) -> Tensor:
    """Orders channels of x by backward elimination: without the first, the regression of y on the others loses least.

    Where P is the inverse of the Gram matrix of x and ``W = P E x y^T`` its regression, the loss grows by
    ``|W_c|^2 / P_cc`` without channel c, and P and W without it follow from P and W with it.

    Args:
        moments: Sums over at least two tokens.
        ridge: Added to the Gram matrix, times its diagonal: channels may be collinear.

    Returns:
        Indices of the channels, (C_x,).
    """
    gram = moments.xx.clone()
    diagonal = gram.diagonal()
    diagonal.add_(ridge * diagonal + 1e-300)
    inverse = torch.linalg.inv(gram)
    fit, left, order = inverse @ moments.xy, torch.arange(len(gram), device=gram.device), []
    while len(left):
        # A few at a time, which are exact among themselves: products of large matrices are many times as fast as sums
        # of outer products.
        count, losses = max(1, len(left) // 64), fit.square().sum(1) / inverse.diagonal()
        near = losses.argsort()[: 2 * count]
        out = near[_eliminate(inverse[near][:, near], fit[near], count)]
        stay = torch.ones_like(left, dtype=torch.bool)
        stay[out] = False
        stay = stay.nonzero()[:, 0]
        order.append(left[out])
        update = torch.linalg.solve(inverse[out][:, out], torch.cat([inverse[out][:, stay], fit[out]], 1))
        update = inverse[stay][:, out] @ update
        inverse, fit = inverse[stay][:, stay] - update[:, : len(stay)], fit[stay] - update[:, len(stay) :]
        left = left[stay]
    return torch.cat(order)


def _eliminate(inverse: Tensor, fit: Tensor, count: int) -> list[int]:
    """Indices of ``count`` channels in the order in which they go; the arguments are changed."""
    order: list[int] = []
    for _ in range(count):
        losses = fit.square().sum(1) / inverse.diagonal()
        losses[order] = torch.inf
        out = int(losses.argmin())
        column, row, pivot = inverse[:, out].clone(), fit[out].clone(), inverse[out, out].clone()
        inverse -= column.outer(column) / pivot
        fit -= column.outer(row) / pivot
        inverse[out, out] = 1.0
        order.append(out)
    return order


def _with_shift(moments: CrossMoments, matrix: Tensor) -> Affine:
    return Affine(matrix, moments.mean_y - matrix @ moments.mean_x)
