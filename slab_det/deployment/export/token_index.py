"""Which token sits where, as arithmetic on the size of the map: the graph computes it anew for every image."""

from __future__ import annotations

import torch
from torch import Tensor

from slab_det.attention.geometry import Windows, mask_regions


class WindowIndex(Windows):
    """The windows of one map of one image, without anything that was computed for one size.

    One gather cuts windows, sets heads apart and fills padding at once, and one puts the tokens back.

    Args:
        height: Rows of the map, in tokens, perhaps symbolic.
        width: Columns of the map.
        window_size: Side w of a window; N = w * w slots.
        shift: Cyclic shift towards the top left, in tokens.
        device: Where indices are computed.
    """

    def __init__(self, height: int, width: int, window_size: int, shift: int, device: torch.device) -> None:
        self.window_size = window_size
        self._num_tokens = height * width
        self._num_slots = window_size**2
        self._shift = shift
        self._device = device
        self._rows = _Axis(height, window_size, shift, device)
        self._columns = _Axis(width, window_size, shift, device)

    def cut(self, qkv: Tensor, padding: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        qkv = qkv[0]
        row = padding.to(qkv.dtype)
        # Each row of qkv is 3 g rows of C / g channels, and so is the last one, of a padding token.
        rows = torch.cat([qkv, row[None]]).reshape(-1, int(row.shape[0]) // (3 * groups))
        first = self._tokens()[:, None] * (3 * groups) + torch.arange(groups, device=self._device)[:, None]
        return tuple(_gather_rows(rows, first + part * groups) for part in range(3))

    def merge(self, windows: Tensor) -> Tensor:
        # Numbers, not sizes that the graph computes: the weights fix them.
        groups, channels = int(windows.shape[1]), int(windows.shape[3])
        window, slot = self._places()
        place = (window[:, None] * groups + torch.arange(groups, device=self._device)) * self._num_slots
        rows = _gather_rows(windows.reshape(-1, channels), place + slot[:, None])
        return rows.reshape(1, -1, groups * channels)

    def attention_mask(self, dtype: torch.dtype) -> Tensor | None:
        if not self._shift:
            return None
        regions = self._rows.band()[:, None, :, None] * 3 + self._columns.band()[None, :, None, :]
        return mask_regions(regions.reshape(-1, self._num_slots), dtype)

    def padding_mask(self) -> Tensor:
        return self._is_padding().reshape(-1, self._num_slots)

    def _tokens(self) -> Tensor:
        """The token in each slot, (nW, N); H * W, one behind the last token, in slots of padding."""
        rows, columns = self._rows, self._columns
        token = rows.source()[:, None, :, None] * columns.side + columns.source()[None, :, None, :]
        return torch.where(self._is_padding(), self._num_tokens, token).reshape(-1, self._num_slots)

    def _places(self) -> tuple[Tensor, Tensor]:
        """The window and the slot in it of each token, (H * W,) each."""
        (row_window, row), (column_window, column) = self._rows.place(), self._columns.place()
        window = row_window[:, None] * self._columns.num_windows + column_window
        return window.reshape(-1), (row[:, None] * self.window_size + column).reshape(-1)

    def _is_padding(self) -> Tensor:
        rows, columns = (axis.source() >= axis.side for axis in (self._rows, self._columns))
        return rows[:, None, :, None] | columns[None, :, None, :]


class _Axis:
    """One side of a map, padded to whole windows and rolled."""

    def __init__(self, side: int, window_size: int, shift: int, device: torch.device) -> None:
        self.side = side
        self.window_size = window_size
        self.shift = shift
        self.device = device
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
        rolled = self._wrap(torch.arange(self.side, device=self.device) + (self.padded - self.shift))
        return torch.div(rolled, self.window_size, rounding_mode='floor'), torch.remainder(rolled, self.window_size)

    def _wrap(self, position: Tensor) -> Tensor:
        # At most one lap too far, and a comparison is cheaper than a remainder.
        return torch.where(position >= self.padded, position - self.padded, position)

    def _places(self) -> Tensor:
        windows = torch.arange(self.num_windows, device=self.device)
        return windows[:, None] * self.window_size + torch.arange(self.window_size, device=self.device)


def _gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows (R, C) of ``x`` at an index of any shape: (*index.shape, C)."""
    return x.index_select(0, index.reshape(-1)).reshape(*index.shape, x.shape[-1])
