"""Counts, means and scatters of tokens that are collected in parts: by batch and by process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mmengine.dist import all_gather, get_world_size
from torch import Tensor


def merge_moments(counts: Tensor, means: Tensor, scatters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of the union of P parts: the formula of Chan, Golub and LeVeque (1979).

    The scatter of quantities a and b is the sum over tokens of ``(a - mean a) (b - mean b)``.

    Args:
        counts: Tokens of each part, (P, C) or (P, 1). A part without tokens has zeros in all three.
        means: Of K quantities, (P, K, C).
        scatters: (P, K, K, C).

    Returns:
        The same three for all parts together, without the dimension of parts.
    """
    count = counts.sum(0)
    mean = (counts[:, None] * means).sum(0) / count.clamp(min=1)
    distances = means - mean
    between = distances[:, :, None] * distances[:, None] * counts[:, None, None]
    return count, mean, (scatters + between).sum(0)


class Moments:
    """Count, means and scatters per channel of one or several quantities, in float64.

    Attributes:
        count: Tokens so far. Without any there is nothing but this.
        mean: (K, C).
        scatter: Of each pair, (K, K, C).
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | None = None
        self.scatter: Tensor | None = None

    def add(self, *quantities: Tensor) -> None:
        """Adds tokens, (..., C) for each of the K quantities."""
        means, deviations = [], []
        for quantity in quantities:
            # A copy to work in: each further array of a large map's size costs more than the arithmetic, see
            # benchmarks/moments.py.
            tokens = quantity.detach().flatten(0, -2).to(torch.float64, copy=True)
            means.append(tokens.mean(0))
            deviations.append(tokens.sub_(means[-1]))
        if len(tokens) == 0:
            return
        part = Moments()
        part.count, part.mean = len(tokens), torch.stack(means)
        part.scatter = tokens.new_empty(len(means), *part.mean.shape)
        for i, a in enumerate(deviations):
            for j, b in enumerate(deviations[:i]):
                part.scatter[i, j] = part.scatter[j, i] = (a * b).sum(0)
        for i, a in enumerate(deviations):
            part.scatter[i, i] = a.square_().sum(0)
        self.merge(part)

    def merge(self, other: Moments) -> None:
        """Adds the tokens of ``other``."""
        parts = [part for part in (self, other) if part.count]
        if len(parts) == 2:
            # Filled on the device: a list would have to be copied there, and waited for.
            counts = torch.stack([part.mean.new_full((1,), part.count) for part in parts])
            _, self.mean, self.scatter = merge_moments(
                counts, torch.stack([part.mean for part in parts]), torch.stack([part.scatter for part in parts])
            )
        elif other.count:
            self.mean, self.scatter = other.mean, other.scatter
        self.count += other.count

    @property
    def var(self) -> Tensor:
        """Population variances, (K, C)."""
        return self.scatter.diagonal().T / self.count


def pool_moments(count: Tensor, mean: Tensor, m2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Moments of the tokens of all processes, from those of each process.

    Every process gets the same result to the last bit.

    Args:
        count: Numbers of tokens, (C,) or (1,). May be 0, with mean and m2 0.
        mean: (C,).
        m2: Sums of squared deviations from ``mean``, (C,).

    Returns:
        The same three for all processes together, (C,) each, in float64.
    """
    count, mean, scatter = _pool(count, mean[None], m2[None, None])
    return count, mean[0], scatter[0, 0]


def pool_over_ranks(
    moments: Sequence[Moments], sizes: Sequence[int], num_quantities: int, device: torch.device
) -> None:
    """Makes each of ``moments`` that of the tokens of all processes; one message for all of them.

    Args:
        moments: In the same order in every process.
        sizes: Channels of each.
        num_quantities: K, which a process that has seen no token cannot know.
        device: Where the processes communicate from.
    """
    if get_world_size() == 1:
        return
    empty = torch.zeros(1, dtype=torch.float64, device=device)

    def join(*shape: int, values: Sequence[Tensor | None]) -> Tensor:
        return torch.cat(
            [
                (empty if value is None else value).expand(*shape, size)
                for value, size in zip(values, sizes, strict=True)
            ],
            -1,
        )

    k = num_quantities
    count, mean, scatter = _pool(
        join(values=[empty + own.count for own in moments]),
        join(k, values=[own.mean for own in moments]),
        join(k, k, values=[own.scatter for own in moments]),
    )
    parts = (values.split(sizes, -1) for values in (count.cpu(), mean, scatter))
    for own, counts, own.mean, own.scatter in zip(moments, *parts, strict=True):
        own.count = int(counts[0])


def _pool(count: Tensor, mean: Tensor, scatter: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`merge_moments` over processes, in float64; the count comes back as (C,)."""
    own = torch.cat([count.double().expand_as(mean[:1]), mean.double(), scatter.double().flatten(0, 1)])
    parts = torch.stack(all_gather(own) if get_world_size() > 1 else [own])
    k = len(mean)
    counts, means, scatters = parts.split([1, k, k * k], 1)
    return merge_moments(counts[:, 0], means, scatters.unflatten(1, (k, k)))
