"""Ridge regression of a target on the input of a layer, from sums over tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slab_det.fusion.channels import columns_of

# Ridge penalties, in standardised coordinates. A smaller ridge fits the given images better, but with weights in the
# hundreds that cancel. On some other images, and in bfloat16, the weights do not cancel and the outputs explode.
RIDGES = tuple(10.0**power for power in range(-4, 3))
# The ridge where no batch is held out to choose one.
DEFAULT_RIDGE = 1e-2
# A larger ridge is preferred while its error is at most this multiple of the least error.
SLACK = 1.05
# Tokens per chunk on a CPU, and on a GPU, where each chunk costs some twenty launches.
CHUNK, GPU_CHUNK = 4096, 32768
# Rows of xx per matrix product; the part below the diagonal is copied from the part above.
BLOCK = 256


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

    def add(self, x: Tensor, y: Tensor, weight: Tensor | None = None) -> None:
        """Adds tokens, (..., C_x) and (..., C_y), if there are any; each counts ``weight`` times, (..., 1), or once."""
        if not x.numel():
            return
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

    def add_to_target(self, weight: Tensor, bias: Tensor) -> None:
        """Changes the target from y to ``y + weight x + bias``; weight (C_y, C_x), bias (C_y,)."""
        weight = weight.double()
        self.yy += 2 * (weight.T * self.xy).sum(0) + ((weight @ self.xx) * weight).sum(1)
        self.xy += self.xx @ weight.T
        self.mean_y += weight @ self.mean_x + bias.double()

    def with_target(self, weight: Tensor) -> CrossMoments:
        """Returns the sums for the target ``weight x``, weight (C_y, C_x)."""
        other = copy(self)
        other.mean_y, other.xy = weight @ self.mean_x, self.xx @ weight.T
        other.yy = ((weight @ self.xx) * weight).sum(1)
        return other

    def deviation(self) -> Tensor:
        """The standard deviations of y, (C_y,); 1 for a constant."""
        return (self.yy / self.count).sqrt().where(self.yy > 0, 1.0)

    def divide_target(self, scale: Tensor) -> CrossMoments:
        """Returns the sums for the target ``y / scale``, scale (C_y,)."""
        other = copy(self)
        if self.count:
            other.mean_y, other.xy, other.yy = self.mean_y / scale, self.xy / scale, self.yy / scale.square()
        return other

    def subtract_from_target(self, shift: Tensor) -> CrossMoments:
        """Returns the sums for the target ``y - shift``, shift (C_y,)."""
        other = copy(self)
        if self.count:
            other.mean_y = self.mean_y - shift
        return other

    def select(self, channels: Tensor) -> CrossMoments:
        """Returns the sums for the channels of x with these indices."""
        other = copy(self)
        if self.count:
            other.mean_x, other.xx, other.xy = self.mean_x[channels], self.xx[channels][:, channels], self.xy[channels]
        return other

    def project(self, weight: Tensor, channels: Tensor, ridge: float = RIDGES[0]) -> Tensor:
        """The regression of ``weight x`` on the channels of x with these indices, (C_y, K)."""
        gram = self.xx[channels][:, channels].clone()
        gram.diagonal().add_(ridge * gram.diagonal() + 1e-300)
        return torch.linalg.solve(gram, self.xx[channels] @ weight.double().T).T

    def unexplained(self, fit: Affine) -> float:
        """The squared error of ``fit`` over the variance of y: 0 is exact, above 1 is worse than the mean of y."""
        matrix = fit.matrix
        squares = self.yy.sum() - 2 * (matrix.T * self.xy).sum() + ((matrix @ self.xx) * matrix).sum()
        offset = self.mean_y - matrix @ self.mean_x - fit.shift
        return float((squares + self.count * offset.square().sum()) / self.yy.sum().clamp(min=1e-300))

    def variance(self) -> float:
        """The variance of y, summed over channels."""
        return float(self.yy.sum() / self.count)

    def mean_square(self) -> float:
        """The mean of ``|y|^2`` over tokens, which is the squared error without a fit."""
        return float(self.yy.sum() / self.count + self.mean_y.square().sum())


def join_channels(parts: Sequence[CrossMoments], channels: int) -> CrossMoments:
    """Joins regressions on the same channels, each of its own tokens and targets, for :func:`rank_channels`.

    A channel has its columns of the first regression, then those of the second and so on.
    """
    if len(parts) == 1:
        return parts[0]
    columns = [len(part.xx) // channels for part in parts]
    outputs = [part.xy.shape[1] for part in parts]
    joint, width = CrossMoments(), sum(columns)
    joint.count = sum(part.count for part in parts)
    joint.xx = parts[0].xx.new_zeros(channels, width, channels, width)
    joint.xy = parts[0].xy.new_zeros(channels, width, sum(outputs))
    column = output = 0
    for part, k, n in zip(parts, columns, outputs, strict=True):
        own = slice(column, column + k)
        joint.xx[:, own, :, own] = part.xx.view(channels, k, channels, k)
        joint.xy[:, own, output : output + n] = part.xy.view(channels, k, n)
        column, output = column + k, output + n
    joint.xx, joint.xy = joint.xx.flatten(2).flatten(0, 1), joint.xy.flatten(0, 1)
    return joint


def measured_part(moments: CrossMoments, held_out: CrossMoments) -> CrossMoments:
    """The moments on which errors are measured: the held-out ones, or the fitted ones where nothing is held out."""
    return held_out if held_out.count else moments


class Affine(NamedTuple):
    """``y = matrix x + shift``, (C_y, C_x) and (C_y,), in float64."""

    matrix: Tensor
    shift: Tensor


def diagonal_fit(moments: CrossMoments) -> Affine:
    """Least-squares fit of ``y_c = s_c (x_c - mean over channels of x) + t_c``: a LayerNorm with a constant sigma.

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
    """Yields for each ridge r the map that minimises
    ``E |y - M x - t|^2 + r |(M - prior) diag(sigma)|^2 + q |M - prior|^2``.

    sigma are the standard deviations of x, and q is ``moments.rounding``. In standardised coordinates, with
    G = E z z^T and the diagonal R = r + q / sigma^2, ``M = (E y z^T + prior R) (G + R)^-1``. One M serves all layers
    that read y, because the fit is linear in y.

    Args:
        moments: Sums over at least two tokens.
        prior: (C_y, C_x).
        ridges: The values of r.
    """
    var = moments.xx.diagonal() / moments.count
    # A channel that is constant up to rounding keeps the prior.
    varies = var > 1e-12 * (moments.mean_x.square() + var)
    sigma = var.where(varies, 1.0).sqrt()
    gram = moments.xx / (sigma * moments.count)
    gram /= sigma[:, None]
    gram.masked_fill_(~(varies[:, None] & varies), 0.0)
    target = torch.where(varies[:, None], moments.xy / moments.count / sigma[:, None], 0.0)
    start = (prior * sigma).T
    for ridge in ridges:
        pull = ridge + moments.rounding / sigma.square()
        # One factorisation per ridge: an FFN has matrices of hundreds of MB, and eigenvectors would be slower still.
        system = gram.clone()
        system.diagonal().add_(pull)
        factor = torch.linalg.cholesky(system)
        del system
        yield _with_shift(moments, (torch.cholesky_solve(target + pull[:, None] * start, factor) / sigma[:, None]).T)


def choose_fit(moments: CrossMoments, held_out: CrossMoments, prior: Tensor) -> Affine:
    """Returns the fit of the largest ridge whose error on ``held_out`` is at most ``SLACK`` times the least error.

    Where nothing is held out, returns the fit of ``DEFAULT_RIDGE``.
    """
    if held_out.count == 0:
        return next(ridge_fits(moments, prior, (DEFAULT_RIDGE,)))
    least = math.inf
    # Ridges grow: once the error exceeds the bound it stays above, and later factorisations are skipped.
    for fit in ridge_fits(moments, prior):
        share = held_out.unexplained(fit)
        least = min(least, share)
        # Rounding may make the share of an exact fit negative.
        if share - least > (SLACK - 1) * abs(least):
            break
        chosen = fit
    return chosen


def rank_channels(
    moments: CrossMoments, heads: int = 1, columns: int = 1, ridge: float = RIDGES[0]
) -> tuple[Tensor, Tensor]:
    """Orders the channels of x by backward elimination: the channel that the regression of y on x needs least is first.

    With P the inverse of the Gram matrix of x and ``W = P E x y^T`` the regression, removing channel c raises the loss
    by ``W_c^T P_cc^-1 W_c``. P and W are then updated to the channels that are left.

    Args:
        moments: Sums over at least two tokens.
        heads: Number of heads, consecutive channels of equal number. One channel of each head goes at a time.
        columns: Columns of x per channel, one after another: the positions of a kernel.
        ridge: This multiple of the Gram matrix's diagonal is added to it, because channels may be collinear.

    Returns:
        Indices of the C channels in the order of their removal, (C,), and the summed squared error that the channels
        removed up to each one have added, (C,).
    """
    gram = moments.xx.clone()
    diagonal = gram.diagonal()
    diagonal.add_(ridge * diagonal + 1e-300)
    inverse = torch.linalg.inv(gram)
    fit, left = inverse @ moments.xy, torch.arange(len(gram) // columns, device=gram.device)
    gone, order, added = torch.zeros_like(left, dtype=torch.bool), [], []
    while remaining := int((~gone).sum()):
        # Copies take as long as the products, so removed channels stay as rows until an eighth of the rows is gone.
        if remaining < 7 * len(left) // 8:
            rows = columns_of((~gone).nonzero()[:, 0], columns)
            left, inverse, fit, gone = left[~gone], inverse[rows][:, rows], fit[rows], gone[~gone]
        # NaN goes before removed channels, so that the loop ends.
        losses = _removal_losses(inverse, fit, columns).nan_to_num(nan=1e300).masked_fill(gone, torch.inf)
        if heads > 1:
            out = losses.view(heads, -1).argmin(1) + torch.arange(heads, device=left.device) * (len(left) // heads)
        else:
            # Channels go in small groups, since one product of large matrices is much faster than many small ones.
            # The elimination within a group's candidates is exact.
            count = max(1, remaining // 64)
            near = losses.argsort()[: min(2 * count, remaining)]
            rows = columns_of(near, columns)
            out = near[_eliminate(inverse[rows][:, rows], fit[rows], count, columns)]
        order.append(left[out])
        gone[out] = True
        rows = columns_of(out, columns)
        update = torch.linalg.solve(inverse[rows][:, rows], torch.cat([inverse[rows], fit[rows]], 1))
        loss = (update[:, len(inverse) :] * fit[rows]).sum() / len(out)
        added.append(loss.expand(len(out)))
        across = inverse[:, rows]
        inverse.addmm_(across, update[:, : len(inverse)], alpha=-1)
        fit.addmm_(across, update[:, len(inverse) :], alpha=-1)
        # What is left of the removed rows is rounding noise; their blocks must stay invertible.
        inverse[rows], inverse[:, rows], fit[rows] = 0.0, 0.0, 0.0
        inverse.diagonal()[rows] = 1.0
    return torch.cat(order), torch.cat(added).cumsum(0)


@torch.no_grad()
def reduce_rank(
    queries: CrossMoments,
    keys: CrossMoments,
    weight: Tensor,
    bias: Tensor | None,
    heads: int,
    rank: int,
    padding: Tensor | None = None,
) -> float:
    """Changes a projection so that q and k of each head are zero behind their first channels, in place.

    With S_q the second moments of q and S_k the covariance of k, ``q^T k`` is approximated by ``(A q)^T (B k)`` from
    the first terms of the singular value decomposition ``S_q^1/2 S_k^1/2 = U s V^T``: ``A = s^1/2 U^T S_q^-1/2`` and
    ``B = s^1/2 V^T S_k^-1/2``. The mean of k does not count: it adds the same to all logits of a query.

    Args:
        queries: Sums over the tokens that queries come from, as x.
        keys: Sums over the tokens that keys come from, as x.
        weight: Projection to q, k and v, (3 h d, C).
        bias: (3 h d,) or None.
        heads: Number of heads h.
        rank: Number of channels that do not become zero.
        padding: q, k and v of padding tokens, (3 h d,), which change too; None if they are the bias.

    Returns:
        The share of the logits' second moment that is lost, in the head that loses most.
    """
    worst, count = 0.0, len(weight) // 3
    for q, to_q, s, to_k in _logit_terms(queries, keys, weight, bias, heads):
        worst = max(worst, float(s[rank:].square().sum() / s.square().sum().clamp(min=1e-300)))
        s = torch.where(torch.arange(len(s), device=s.device) < rank, s, 0.0).sqrt()[:, None]
        for rows, matrix in ((q, s * to_q), (count + q, s * to_k)):
            for values in filter(torch.is_tensor, (weight, bias, padding)):
                values[rows] = (matrix @ values[rows].double()).to(values.dtype)
    return worst


def lost_logits(queries: CrossMoments, keys: CrossMoments, weight: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    """The mean squared error of ``q^T k`` at each rank 0, 1, ..., d of queries and keys, (h, d + 1).

    :func:`reduce_rank` describes the arguments.
    """
    terms = [s.square() for _, _, s, _ in _logit_terms(queries, keys, weight, bias, heads)]
    return nn.functional.pad(torch.stack(terms).flip(1).cumsum(1).flip(1), (0, 1))


@torch.no_grad()
def _logit_terms(
    queries: CrossMoments, keys: CrossMoments, weight: Tensor, bias: Tensor | None, heads: int
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yields the rows of q of each head, ``U^T S_q^-1/2``, s and ``V^T S_k^-1/2``; see :func:`reduce_rank`."""
    count = len(weight) // 3
    cov_q, cov_k = (moments.xx / moments.count for moments in (queries, keys))
    for q in torch.arange(count, device=weight.device).split(count // heads):
        w_q, w_k = weight[q].double(), weight[count + q].double()
        mean = w_q @ queries.mean_x + (0.0 if bias is None else bias[q].double())
        (root_q, inverse_q), (root_k, inverse_k) = map(
            _roots, (w_q @ cov_q @ w_q.T + mean.outer(mean), w_k @ cov_k @ w_k.T)
        )
        u, s, vh = torch.linalg.svd(root_q @ root_k)
        yield q, u.T @ inverse_q, s, vh @ inverse_k


def _roots(moments: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric square root of a matrix of second moments, and its pseudo-inverse."""
    values, vectors = torch.linalg.eigh(moments)
    roots = values.clamp(min=0).sqrt()
    inverse = torch.where(roots > 1e-6 * roots.max(), 1 / roots, 0.0)
    return vectors * roots @ vectors.T, vectors * inverse @ vectors.T


def _removal_losses(inverse: Tensor, fit: Tensor, columns: int) -> Tensor:
    """The loss that removing each channel alone would add, (C,)."""
    if columns == 1:
        return fit.square().sum(1) / inverse.diagonal()
    blocks = inverse.unflatten(1, (-1, columns)).unflatten(0, (-1, columns)).diagonal(dim1=0, dim2=2).movedim(-1, 0)
    parts = fit.unflatten(0, (-1, columns))
    return (torch.linalg.solve(blocks, parts) * parts).sum((1, 2))


def _eliminate(inverse: Tensor, fit: Tensor, count: int, columns: int) -> list[int]:
    """Indices of the ``count`` channels to remove first, in order; overwrites its arguments."""
    order: list[int] = []
    for _ in range(count):
        losses = _removal_losses(inverse, fit, columns)
        losses[order] = torch.inf
        order.append(int(losses.argmin()))
        out = slice(order[-1] * columns, (order[-1] + 1) * columns)
        update = torch.linalg.solve(inverse[out, out], torch.cat([inverse[out], fit[out]], 1))
        update = inverse[:, out] @ update
        inverse -= update[:, : len(inverse)]
        fit -= update[:, len(inverse) :]
        # The removed channel stays as a row that no other row depends on.
        inverse[out, out] = torch.eye(columns, dtype=inverse.dtype, device=inverse.device)
    return order


def _with_shift(moments: CrossMoments, matrix: Tensor) -> Affine:
    return Affine(matrix, moments.mean_y - matrix @ moments.mean_x)
