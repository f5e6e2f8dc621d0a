"""Which tokens of a padded batch lie inside their image."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slab_det.errors import SlabDetError


class TokenSplit(NamedTuple):
    """Places in the tokens (B * L, C) of a batch, in ascending order: of those inside an image and of the others."""

    valid: Tensor
    padding: Tensor


class ValidTokens:
    """The images of the batch at hand; the norms of a model share one.

    A token is inside its image if it begins there: on a map of stride s the one in row r and column c if s r is below
    the height and s c below the width. The split is made once for each size of map and batch, from sizes that the CPU
    knows: nothing waits for the device.
    """

    def __init__(self) -> None:
        self._sizes: list[tuple[int, int]] = []
        self._batch_shape = (0, 0)
        self._splits: dict[tuple, TokenSplit | None] = {}

    def set_batch(self, sizes: Sequence[tuple[int, int]], batch_shape: tuple[int, int]) -> None:
        """Takes the (H, W) of the images of the next batch, and those of the batch that they are padded to."""
        self._sizes, self._batch_shape = [tuple(size[:2]) for size in sizes], tuple(batch_shape)
        self._splits.clear()

    def split(self, x: Tensor) -> TokenSplit | None:
        """Which tokens of ``x``, (B, L, C), are valid; None if all are, or if no batch was set.

        Raises:
            SlabDetError: If ``x`` is no map of the batch.
        """
        if all(size == self._batch_shape for size in self._sizes):
            return None
        key = tuple(x.shape[:-1]), x.device
        if key not in self._splits:
            self._splits[key] = self._make_split(*key)
        return self._splits[key]

    def _make_split(self, shape: tuple[int, ...], device: torch.device) -> TokenSplit | None:
        height, width = self._batch_shape
        # Backbones halve maps, rounding up.
        grids = ((stride, -(-height // stride), -(-width // stride)) for stride in (2 ** i for i in range(9)))
        stride, rows, columns = next((g for g in grids if shape == (len(self._sizes), g[1] * g[2])), (0, 0, 0))
        if not stride:
            raise SlabDetError(
                f'padding cannot be left out of statistics: tokens {shape} are no map of {len(self._sizes)} images '
                f'padded to {height}x{width}; let the data preprocessor pad to multiples of 32 '
                '(pad_size_divisor=32), run each batch through it, or remove ExcludePaddingHook')
        sizes = torch.tensor(self._sizes)
        is_row = stride * torch.arange(rows) < sizes[:, :1]
        is_column = stride * torch.arange(columns) < sizes[:, 1:]
        is_valid = (is_row[:, :, None] & is_column[:, None, :]).flatten()
        if is_valid.all():
            return None
        return TokenSplit(*(places.nonzero()[:, 0].to(device, non_blocking=True) for places in (is_valid, ~is_valid)))
