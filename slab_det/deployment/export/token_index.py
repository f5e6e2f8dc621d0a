"""Which token sits where, as arithmetic on the size of the map: the graph computes it anew for every image."""

from __future__ import annotations

import torch
from torch import Tensor

from slab_det.attention.geometry import MASKED_LOGIT


class WindowIndex:
    """What :class:`slab_det.attention.geometry.WindowGeometry` knows, without anything that was computed for one size.

    Args:
        height: Rows of the map, in tokens, perhaps symbolic.
        width: Columns of the map.
        window_size: Side w of a window; N = w * w slots.
        shift: Cyclic shift towards the top left, in tokens.
    """

    def __init__(self, height: int, width: int, window_size: int, shift: int) -> None:
        self.num_tokens = height * width
        self.num_slots = window_size**2
        self._rows = _Axis(height, window_size, shift)
        self._columns = _Axis(width, window_size, shift)
        self.num_windows = self._rows.num_windows * self._columns.num_windows

    def tokens(self) -> Tensor:
        """The token in each slot, (nW, N); H * W, one behind the last token, in slots of padding."""
        rows, columns = self._rows, self._columns
        token = rows.source()[:, None, :, None] * columns.side + columns.source()[None, :, None, :]
        return torch.where(self._is_padding(), self.num_tokens, token).reshape(-1, self.num_slots)

    def slots(self) -> tuple[Tensor, Tensor]:
        """The window and the slot in it of each token, (H * W,) each."""
        (row_window, row), (column_window, column) = self._rows.place(), self._columns.place()
        window = row_window[:, None] * self._columns.num_windows + column_window
        return window.reshape(-1), (row[:, None] * self._rows.window_size + column).reshape(-1)

    def padding(self) -> Tensor:
        """True in slots of padding, (nW, N)."""
        return self._is_padding().reshape(-1, self.num_slots)

    def attention_mask(self, dtype: torch.dtype) -> Tensor:
        """The additive mask of shifted windows, (nW, N, N): 0 within a region of the map, -100 across."""
        region = self._rows.band()[:, None, :, None] * 3 + self._columns.band()[None, :, None, :]
        region = region.reshape(-1, self.num_slots)
        return (region[:, :, None] != region[:, None, :]).to(dtype) * MASKED_LOGIT

    def _is_padding(self) -> Tensor:
        rows, columns = (axis.source() >= axis.side for axis in (self._rows, self._columns))
        return rows[:, None, :, None] | columns[None, :, None, :]


class _Axis:
    """One side of a map, padded to whole windows and rolled."""

    def __init__(self, side: int, window_size: int, shift: int) -> None:
        self.side = side
        self.window_size = window_size
        self.shift = shift
        self.num_windows = (side + window_size - 1) // window_size
        self.padded = self.num_windows * window_size

    def source(self) -> Tensor:
        """The row of the unrolled map that each place of each window holds, (windows, w)."""
        return self._wrap(self._places() + self.shift)

    def band(self) -> Tensor:
        """0, 1 or 2: untouched by the shift, kept, wrapped around; (windows, w)."""
        places = self._places()
        return (places >= self.padded - self.window_size).to(torch.int64) + (places >= self.padded - self.shift).to(
            torch.int64
        )

    def place(self) -> tuple[Tensor, Tensor]:
        """The window and the place in it of each row of the map, (side,) each."""
        rolled = self._wrap(torch.arange(self.side) + (self.padded - self.shift))
        return torch.div(rolled, self.window_size, rounding_mode='floor'), torch.remainder(rolled, self.window_size)

    def _wrap(self, position: Tensor) -> Tensor:
        # At most one lap too far, and a comparison is cheaper than a remainder.
        return torch.where(position >= self.padded, position - self.padded, position)

    def _places(self) -> Tensor:
        return torch.arange(self.num_windows)[:, None] * self.window_size + torch.arange(self.window_size)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows (R, C) of ``x`` at an index of any shape: (*index.shape, C)."""
    return x.index_select(0, index.reshape(-1)).reshape(*index.shape, x.shape[-1])
