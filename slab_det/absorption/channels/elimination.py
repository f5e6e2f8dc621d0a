"""What goes with least loss: hidden channels by backward elimination, and the rank of queries and keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from slab_det.absorption.moments import CrossMoments
from slab_det.fusion.channels import columns_of

# This multiple of its diagonal is added to a Gram matrix of channels, which may be collinear. In a detector the errors
# of fits on other images were within two hundredths of those of the best ridge, with 5, 12 and 60 images to fit.
RIDGE = 1e-4


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


def rank_channels(moments: CrossMoments, heads: int = 1, columns: int = 1) -> tuple[Tensor, Tensor]:
    """Orders the channels of x by backward elimination: the channel that the regression of y on x needs least is first.

    With P the inverse of the Gram matrix of x and ``W = P E x y^T`` the regression, removing channel c raises the loss
    by ``W_c^T P_cc^-1 W_c``. P and W are then updated to the channels that are left.

    Args:
        moments: Sums over at least two tokens.
        heads: Number of heads, consecutive channels of equal number. One channel of each head goes at a time.
        columns: Columns of x per channel, one after another: the positions of a kernel.

    Returns:
        Indices of the C channels in the order of their removal, (C,), and the summed squared error that the channels
        removed up to each one have added, (C,).
    """
    gram = moments.xx.clone()
    diagonal = gram.diagonal()
    diagonal.add_(RIDGE * diagonal + 1e-300)
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


@torch.no_grad()
def reduce_rank(
    queries: CrossMoments,
    keys: CrossMoments,
    weight: Tensor,
    bias: Tensor | None,
    heads: int,
    rank: int,
    padding: Tensor | None = None,
) -> None:
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
    """
    count = len(weight) // 3
    for q, to_q, s, to_k in _logit_terms(queries, keys, weight, bias, heads):
        s = torch.where(torch.arange(len(s), device=s.device) < rank, s, 0.0).sqrt()[:, None]
        for rows, matrix in ((q, s * to_q), (count + q, s * to_k)):
            for values in filter(torch.is_tensor, (weight, bias, padding)):
                values[rows] = (matrix @ values[rows].double()).to(values.dtype)


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
            matrix_roots, (w_q @ cov_q @ w_q.T + mean.outer(mean), w_k @ cov_k @ w_k.T)
        )
        u, s, vh = torch.linalg.svd(root_q @ root_k)
        yield q, u.T @ inverse_q, s, vh @ inverse_k


def matrix_roots(moments: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric square root of a matrix of second moments, and its pseudo-inverse."""
    values, vectors = torch.linalg.eigh(moments)
    roots = values.clamp(min=0).sqrt()
    inverse = torch.where(roots > 1e-6 * roots.max(), 1 / roots, 0.0)
    return vectors * roots @ vectors.T, vectors * inverse @ vectors.T
