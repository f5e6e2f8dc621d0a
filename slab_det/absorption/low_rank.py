"""Queries and keys of lower rank, with nearly the same logits."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from slab_det.absorption.moments import CrossMoments


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
