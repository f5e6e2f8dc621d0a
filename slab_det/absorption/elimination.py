"""Backward elimination: the order in which hidden channels go, by what a regression on the others loses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slab_det.absorption.moments import RIDGE, CrossMoments
from slab_det.fusion.channels import columns_of


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


def rank_channels(
    moments: CrossMoments, heads: int = 1, columns: int = 1, ridge: float = RIDGE
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
