"""Which tokens of a padded batch lie inside their image."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from slab_det.runtime import graph_position, is_recomputed_twice, recomputed_graph_position
from slab_det.runtime.errors import SlabDetError


class TokenSplit(NamedTuple):
    """Places in the tokens (B * L, C) of a batch, in ascending order: of those inside an image and of the others."""

    valid: Tensor
    padding: Tensor


class _Batch(NamedTuple):
    """(H, W) of the images and of what they are padded to."""

    sizes: tuple[tuple[int, int], ...]
    shape: tuple[int, int]


class ValidTokens:
    """The images of the batch at hand; the norms of a model share one.

    A token is inside its image if it begins there: on a map of stride s the one in row r and column c if s r is below
    the height and s c below the width. The split is made once for each size of map and batch, from sizes that the CPU
    knows: nothing waits for the device.

    The recomputation of activation checkpointing gets the split that its forward had, also where other batches were set
    since. A checkpoint within a reentrant one hides which forward that was, and is an error.
    """

    # Batches after which an earlier one can no longer be recomputed.
    MAX_PENDING = 1024

    def __init__(self) -> None:
        # Each with the place where its graph begins.
        self._batches: deque[tuple[int, _Batch]] = deque(maxlen=self.MAX_PENDING)
        self._splits: dict[tuple, TokenSplit | None] = {}

    def set_batch(self, sizes: Sequence[tuple[int, int]], batch_shape: tuple[int, int]) -> None:
        """Takes the (H, W) of the images of the next batch, and those of the batch that they are padded to."""
        self._batches.append((graph_position(), _Batch(tuple(tuple(size[:2]) for size in sizes), tuple(batch_shape))))
        self._splits.clear()

    def split(self, x: Tensor) -> TokenSplit | None:
        """Which tokens of ``x``, (B, L, C), are valid; None if all are, or if no batch was set.

        Raises:
            SlabDetError: If ``x`` is no map of the batch, or could be several; for a checkpoint within a reentrant one;
                if more than ``MAX_PENDING`` batches were set since the forward that is recomputed.
        """
        batch = self._find_batch()
        if batch is None or all(size == batch.shape for size in batch.sizes):
            return None
        key = batch, tuple(x.shape[:-1]), x.device
        if key not in self._splits:
            self._splits[key] = _make_split(*key)
        return self._splits[key]

    def _find_batch(self) -> _Batch | None:
        """The batch of the forward that is running or recomputed."""
        if not self._batches:
            return None
        position = recomputed_graph_position()
        if position is None:
            return self._batches[-1][1]
        if is_recomputed_twice():
            raise SlabDetError(
                'ExcludePaddingHook: an activation checkpoint lies within a reentrant one, so that its '
                'batch is unknown when it is recomputed; use with_cp of the backbone or '
                "mmengine's activation_checkpointing, not both, or remove the hook"
            )
        for start, batch in reversed(self._batches):
            if start <= position:
                return batch
        raise SlabDetError(
            f'ExcludePaddingHook: a forward is recomputed {self.MAX_PENDING} batches after it ran; '
            'run its backward pass earlier'
        )


def _make_split(batch: _Batch, shape: tuple[int, ...], device: torch.device) -> TokenSplit | None:
    masks = [_inside(batch.sizes, *grid) for grid in _find_grids(batch, shape)]
    if not masks or any(not torch.equal(mask, masks[0]) for mask in masks):
        found = 'could be several maps' if masks else 'are no map'
        raise SlabDetError(
            f'padding cannot be left out of statistics: tokens {shape} {found} of {len(batch.sizes)} images '
            f'padded to {"x".join(map(str, batch.shape))}; let the data preprocessor pad to multiples of 32 '
            '(pad_size_divisor=32), run each batch through it, or remove ExcludePaddingHook'
        )
    is_valid = masks[0]
    if is_valid.all():
        return None
    return TokenSplit(*(_send(places.nonzero()[:, 0], device) for places in (is_valid, ~is_valid)))


def _find_grids(batch: _Batch, shape: tuple[int, ...]) -> set[tuple[int, int, int]]:
    """Stride, rows and columns of every map of the batch that has this (B, L)."""
    grids = set()
    # Strided convolutions round down, padded ones up, and the one may follow the other.
    for i, *rounds_up in product(range(9), (True, False), (True, False)):
        stride = 2**i
        rows, columns = ((side + (stride - 1) * up) // stride for side, up in zip(batch.shape, rounds_up, strict=True))
        if shape == (len(batch.sizes), rows * columns):
            grids.add((stride, rows, columns))
    return grids


def _inside(sizes: Sequence[tuple[int, int]], stride: int, rows: int, columns: int) -> Tensor:
    """Whether each token of a map begins inside its image, (B * rows * columns,)."""
    sizes = torch.tensor(sizes)
    is_row = stride * torch.arange(rows) < sizes[:, :1]
    is_column = stride * torch.arange(columns) < sizes[:, 1:]
    return (is_row[:, :, None] & is_column[:, None, :]).flatten()


def _send(places: Tensor, device: torch.device) -> Tensor:
    if device.type != 'cuda':
        return places.to(device)
    # Only from pinned memory does a copy neither wait for what the GPU has to do before it nor risk to be overtaken.
    return places.pin_memory().to(device, non_blocking=True)
