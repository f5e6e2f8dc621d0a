"""Sums over tokens of inputs and targets: all that a regression of the targets needs to know of them."""

from __future__ import annotations

from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

# Tokens per chunk on a CPU, and on a GPU, where each chunk costs some twenty launches.
CHUNK, GPU_CHUNK = 4096, 32768
# Rows of xx per matrix product; the part below the diagonal is copied from the part above.
BLOCK = 256


class Affine(NamedTuple):
    """``y = matrix x + shift``, (C_y, C_x) and (C_y,), in float64."""

    matrix: Tensor
    shift: Tensor


class CrossMoments:
    """Count, means and scatters of inputs x and targets y over tokens, summed in float64.

    Args:
        int8: Fits add a penalty for the rounding of x to int8.

    Attributes:
        count: Number of tokens so far, or the sum of their weights.
        mean_x, mean_y: Means, (C_x,) and (C_y,); None before the first token.
        xx: Sum over tokens of ``(x - mean_x) (x - mean_x)^T``, (C_x, C_x).
        xy: The same sum for x and y, (C_x, C_y).
        yy: The diagonal of the same sum for y, (C_y,).
        low, high: The range of x, extended to contain 0; tracked only with ``int8``.
    """

    def __init__(self, int8: bool = False) -> None:
        self.int8, self.count, self.low, self.high = int8, 0, 0.0, 0.0
        self.mean_x = self.mean_y = self.xx = self.xy = self.yy = None

    @property
    def rounding(self) -> float:
        """The variance of the int8 rounding error of x, with 255 steps over the range of all channels; 0 without int8.

        The step is doubled, because x also carries the rounding errors of earlier layers.
        """
        return (2 * (float(self.high) - float(self.low)) / 255) ** 2 / 12 if self.int8 else 0.0

    def add(self, x: Tensor, y: Tensor | None = None, weight: Tensor | None = None) -> None:
        """Adds tokens, (..., C_x) and (..., C_y), if there are any; each counts ``weight`` times, (..., 1), or once.

        Without y the sums are those of x alone.
        """
        if not x.numel():
            return
        y = x[..., :0] if y is None else y
        if self.int8:
            # These stay tensors: converting them to numbers would synchronise the device for each batch.
            self.low, self.high = x.min().clamp(max=self.low), x.max().clamp(min=self.high)
        # float64 takes twice the time of float32 on a CPU; on a GPU, float32 may be TF32.
        dtype = torch.float64 if x.is_cuda or x.dtype == torch.float64 else torch.float32
        # Chunks bound the memory, which whole maps would exceed, and the length of the sums in float32.
        tensors = (x, y) if weight is None else (x, y, weight)
        parts = (tokens.flatten(0, -2).split(GPU_CHUNK if x.is_cuda else CHUNK) for tokens in tensors)
        for chunk in zip(*parts, strict=True):
            self._add_chunk(*(part.to(dtype) for part in chunk))

    def _add_chunk(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Updates the sums by the formula of Chan, Golub and LeVeque (1979), in place, because xx is large."""
        added = len(x) if weight is None else float(weight.sum(dtype=torch.float64))
        mean_x, mean_y = (
            (part if weight is None else weight * part).sum(0, dtype=torch.float64) / added for part in (x, y)
        )
        if self.count == 0:
            self.mean_x, self.mean_y = torch.zeros_like(mean_x), torch.zeros_like(mean_y)
            self.xx, self.xy = mean_x.new_zeros(len(mean_x), len(mean_x)), mean_x.new_zeros(len(mean_x), len(mean_y))
            self.yy = torch.zeros_like(mean_y)
        count = self.count + added
        x, y = x - mean_x.to(x.dtype), y - mean_y.to(y.dtype)
        if weight is not None:
            x, y = weight.sqrt() * x, weight.sqrt() * y
        for start in range(0, len(mean_x), BLOCK):
            rows, rest = slice(start, start + BLOCK), slice(start + BLOCK, None)
            products = x[:, rows].T @ x[:, start:]
            self.xx[rows, start:] += products
            self.xx[rest, rows] += products[:, BLOCK:].T
            self.xy[rows] += x[:, rows].T @ y
        self.yy += y.square().sum(0)
        mean_x, mean_y = mean_x - self.mean_x, mean_y - self.mean_y
        between = self.count * added / count
        self.xx.addr_(mean_x, mean_x, alpha=between)
        self.xy.addr_(mean_x, mean_y, alpha=between)
        self.yy += between * mean_y.square()
        self.mean_x += mean_x * (added / count)
        self.mean_y += mean_y * (added / count)
        self.count = count

    def merge(self, other: CrossMoments) -> CrossMoments:
        """Returns the sums over the tokens of both, which have the same channels."""
        if not (self.count and other.count):
            return self if self.count else other
        joint, count = copy(self), self.count + other.count
        x, y = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        between = self.count * other.count / count
        joint.xx = (self.xx + other.xx).addr_(x, x, alpha=between)
        joint.xy = (self.xy + other.xy).addr_(x, y, alpha=between)
        joint.yy = self.yy + other.yy + between * y.square()
        joint.mean_x, joint.mean_y = self.mean_x + x * (other.count / count), self.mean_y + y * (other.count / count)
        joint.low, joint.high, joint.count = min(self.low, other.low), max(self.high, other.high), count
        return joint

    def is_finite(self) -> bool:
        """Whether no token was NaN or infinite."""
        return not self.count or bool(self.xx.isfinite().all() and self.yy.isfinite().all())

    def about_zero(self) -> CrossMoments:
        """Returns the sums about zero instead of about the means, so that a fit has no shift."""
        other = copy(self)
        if self.count:
            x, y = self.mean_x, self.mean_y
            other.mean_x, other.mean_y = torch.zeros_like(x), torch.zeros_like(y)
            other.xx = self.xx + self.count * x.outer(x)
            other.xy = self.xy + self.count * x.outer(y)
            other.yy = self.yy + self.count * y.square()
        return other

    def with_target(self, weight: Tensor, bias: Tensor | float = 0.0) -> CrossMoments:
        """Returns the sums for the target ``weight x + bias``, weight (C_y, C_x), bias (C_y,)."""
        other = copy(self)
        other.mean_y, other.xy = weight @ self.mean_x + bias, self.xx @ weight.T
        other.yy = ((weight @ self.xx) * weight).sum(1)
        return other

    def divide_target(self, scale: Tensor) -> CrossMoments:
        """Returns the sums for the target ``y / scale``, scale (C_y,)."""
        other = copy(self)
        if self.count:
            other.mean_y, other.xy, other.yy = self.mean_y / scale, self.xy / scale, self.yy / scale.square()
        return other

    def select(self, channels: Tensor) -> CrossMoments:
        """Returns the sums for the channels of x with these indices."""
        other = copy(self)
        if self.count:
            other.mean_x, other.xx, other.xy = self.mean_x[channels], self.xx[channels][:, channels], self.xy[channels]
        return other

    def with_ridge(self, ridge: float) -> CrossMoments:
        """Returns the sums with this multiple of the variances added: of the scatter about the means, not the count."""
        other = copy(self)
        if self.count:
            other.xx = self.xx + torch.diag(ridge * self.xx.diagonal())
        return other

    def combine(self, matrix: Tensor) -> CrossMoments:
        """Returns the sums for ``matrix x``, (K, C); a channel of x may have several columns, one after another.

        The range for int8 stays that of x: components have the variance of the maps.
        """

        def apply(rows: Tensor) -> Tensor:
            return torch.tensordot(matrix, rows.unflatten(0, (matrix.shape[1], -1)), 1).flatten(0, 1)

        other = copy(self)
        if self.count:
            other.mean_x, other.xx, other.xy = apply(self.mean_x), apply(apply(self.xx).T), apply(self.xy)
        return other

    def squared_errors(self, fit: Affine) -> Tensor:
        """The squared error of ``fit``, summed over tokens, of each channel of y, (C_y,)."""
        matrix = fit.matrix
        squares = self.yy - 2 * (matrix.T * self.xy).sum(0) + ((matrix @ self.xx) * matrix).sum(1)
        offset = self.mean_y - matrix @ self.mean_x - fit.shift
        return squares + self.count * offset.square()

    def unexplained(self, fit: Affine) -> float:
        """The squared error of ``fit`` over the variance of y: 0 is exact, above 1 is worse than the mean of y."""
        return float(self.squared_errors(fit).sum() / self.yy.sum().clamp(min=1e-300))

    def variance(self) -> float:
        """The variance of y, summed over channels."""
        return float(self.yy.sum() / self.count)

    def mean_square(self) -> float:
        """The mean of ``|y|^2`` over tokens, which is the squared error without a fit."""
        return float(self.yy.sum() / self.count + self.mean_y.square().sum())
