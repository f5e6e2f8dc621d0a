"""The window of a simple moving average, kept on the device."""

from __future__ import annotations

import torch
from mmengine.dist import all_reduce
from torch import Tensor, nn

from slab_det.norms.base import at_least_float32
from slab_det.norms.processes import sum_over_processes


class RecentValues(nn.Module):
    """A ring of the last M values of a vector. Before it is full it holds the values seen so far.

    Counter and place are tensors: nothing here waits for the device, and a checkpoint holds all of it.

    Args:
        window_size: Values M.
        num_features: Channels C of each.

    Raises:
        ValueError: If ``window_size`` is below 1.
    """

    def __init__(self, window_size: int, num_features: int) -> None:
        super().__init__()
        if window_size < 1:
            raise ValueError(f'window_size must be at least 1, got {window_size}')
        self.register_buffer('values', at_least_float32(torch.zeros(window_size, num_features)))
        self.register_buffer('count', torch.zeros((), dtype=torch.int64))

    @property
    def is_full(self) -> Tensor:
        """Whether M values have been seen."""
        return self.count >= len(self.values)

    def push(self, value: Tensor) -> None:
        """Adds ``value``, (C,), in the place of the oldest."""
        self.count += 1
        self.replace_latest(value)

    def replace_latest(self, value: Tensor) -> None:
        """Puts ``value``, (C,), in the place of the one pushed last."""
        self.values.index_copy_(0, self._places(torch.zeros_like(self.count)[None]), value[None])

    def mean(self, rows: Tensor | None = None) -> Tensor:
        """Arithmetic mean over the window, (C,).

        Args:
            rows: A function of ``values``, row by row, to average instead of them.
        """
        rows = self.values if rows is None else rows
        seen = torch.arange(len(rows), device=rows.device) < self.count
        return torch.where(seen[:, None], rows, 0.0).sum(0) / seen.sum()

    def pool_over_processes(self) -> None:
        """Replaces every value by its mean over the processes that have one of the same age.

        A process that has seen fewer values than another, because its batches were not finite, has no part in the
        oldest. ``count`` becomes the largest.
        """
        ages = torch.arange(len(self.values), device=self.values.device)
        # Zeros where nothing was seen yet.
        values = self.values[self._places(ages)].double()
        num_seen = sum_over_processes((ages < self.count).to(values))
        pooled = sum_over_processes(values) / num_seen.clamp(min=1)[:, None]
        all_reduce(self.count, 'max')
        self.values.index_copy_(0, self._places(ages), pooled.to(self.values.dtype))

    def _places(self, ages: Tensor) -> Tensor:
        """Rows of ``values`` of these ages; the one pushed last has age 0."""
        return (self.count - 1 - ages).remainder(len(self.values))

    def extra_repr(self) -> str:
        return 'window_size={}, num_features={}'.format(*self.values.shape)
