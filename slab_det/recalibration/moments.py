"""Counts, means and scatters of tokens that are collected in parts: by batch and by process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mmengine.dist import all_gather_object, get_world_size
from torch import Tensor


class Moments:
    """Count, means and scatters per channel of one or several quantities, in float64.

    The scatter of quantities a and b is the sum over tokens of ``(a - mean a) (b - mean b)``.

    Attributes:
        count: Tokens so far.
        mean: Means of K quantities, (K, C); None before the first token.
        scatter: Scatters of each pair of quantities, (K, K, C); None before the first token.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean: Tensor | None = None
        self.scatter: Tensor | None = None

    def add(self, *quantities: Tensor) -> None:
        """Adds tokens, (..., C) for each of the K quantities."""
        means, deviations = [], []
        for quantity in quantities:
            # One copy to work in: on large maps each further array costs more than the arithmetic.
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
        # Last: the squares take the place of the deviations.
        for i, a in enumerate(deviations):
            part.scatter[i, i] = a.square_().sum(0)
        self.merge(part)

    def merge(self, other: Moments) -> None:
        """Adds the tokens of ``other`` by the formula of Chan, Golub and LeVeque (1979)."""
        if other.count == 0:
            return
        if self.count == 0:
            self.count, self.mean, self.scatter = other.count, other.mean, other.scatter
            return
        count = self.count + other.count
        distance = other.mean - self.mean
        between = distance[:, None] * distance * (self.count * other.count / count)
        self.mean = self.mean + distance * (other.count / count)
        self.scatter = self.scatter + other.scatter + between
        self.count = count

    @property
    def var(self) -> Tensor:
        """Population variances, (K, C)."""
        return self.scatter.diagonal().T / self.count


def pool_over_ranks(moments: Sequence[Moments]) -> list[Moments]:
    """The moments of the tokens of all processes, on the CPU, equal in all processes to the last bit.

    Args:
        moments: Those of this process, in the same order in every process.
    """
    if get_world_size() == 1:
        return list(moments)
    for part in moments:
        if part.count:
            # Another process could not unpickle a tensor of this one's GPU.
            part.mean, part.scatter = part.mean.cpu(), part.scatter.cpu()
    pooled = [Moments() for _ in moments]
    for rank in all_gather_object(list(moments)):
        for whole, part in zip(pooled, rank, strict=True):
            whole.merge(part)
    return pooled
