"""Computes the token in each slot of each window from the size of the map, also inside an exported graph."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from slab_det.attention.geometry import Windows, mask_regions


class WindowIndex(Windows):
    """The windows of one image's map, cut by gathers that also split heads and fill padding.

    Attributes:
        tokens: Index of the token in each slot, (nW, N); H * W in padding slots.

    Args:
        height: Rows of the map, in tokens; symbolic in a trace.
        width: Columns of the map.
        window_size: Side w of a window; N = w * w slots.
        shift: Cyclic shift towards the top left, in tokens.
        device: Where indices are computed.
    """

    def __init__(self, height: int, width: int, window_size: int, shift: int, device: torch.device) -> None:
        self.window_size = window_size
        self._num_slots = window_size**2
        self._shift = shift
        rows, columns = (_axis(side, window_size, shift, device) for side in (height, width))
        self._rows, self._columns = rows, columns
        is_padding = (rows.source >= height)[:, None, :, None] | (columns.source >= width)[None, :, None, :]
        tokens = rows.source[:, None, :, None] * width + columns.source[None, :, None, :]
        self.tokens = torch.where(is_padding, height * width, tokens).reshape(-1, self._num_slots)

    def cut(self, x: Tensor, attention: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        qkv, groups = attention.qkv(x), attention.groups
        row = attention.padding_row().to(qkv.dtype)
        channels = int(row.shape[0])
        # Each token is 3 g rows of C / g channels. The last token is padding.
        rows = torch.cat([qkv.reshape(-1, channels), row[None]]).reshape(-1, channels // (3 * groups))
        first = self.tokens[:, None] * (3 * groups) + torch.arange(groups, device=qkv.device)[:, None]
        return tuple(_gather_rows(rows, first + part * groups) for part in range(3))

    def merge(self, windows: Tensor) -> Tensor:
        # Both sizes depend on weights alone; int() makes them constants of an exported graph.
        groups, channels = int(windows.shape[1]), int(windows.shape[3])
        rows, columns = self._rows, self._columns
        window = (rows.window[:, None] * columns.num_windows + columns.window).reshape(-1)
        slot = (rows.slot[:, None] * self.window_size + columns.slot).reshape(-1)
        first = (window[:, None] * groups + torch.arange(groups, device=windows.device)) * self._num_slots
        merged = _gather_rows(windows.reshape(-1, channels), first + slot[:, None])
        return merged.reshape(1, -1, groups * channels)

    def regions(self) -> Tensor | None:
        """The region of the shifted map that each slot came from, (nW, N); None without a shift."""
        if not self._shift:
            return None
        regions = self._rows.band[:, None, :, None] * 3 + self._columns.band[None, :, None, :]
        return regions.reshape(-1, self._num_slots)

    def attention_mask(self, dtype: torch.dtype) -> Tensor | None:
        regions = self.regions()
        return None if regions is None else mask_regions(regions, dtype)


class _Axis(NamedTuple):
    """One side of a map, padded to whole windows and rolled.

    Attributes:
        num_windows: Windows along this side.
        source: Position on the unrolled map of each slot in each window, (windows, w).
        band: 0 before the last window; in the last window 1, or 2 for slots that wrapped around; (windows, w).
        window: The window that holds each position of the map, (side,).
        slot: The slot in that window, (side,).
    """

    num_windows: int
    source: Tensor
    band: Tensor
    window: Tensor
    slot: Tensor


def _axis(side: int, window_size: int, shift: int, device: torch.device) -> _Axis:
    num_windows = (side + window_size - 1) // window_size
    padded = num_windows * window_size

    def wrap(position: Tensor) -> Tensor:
        # Positions are below 2 * padded, and a comparison is cheaper than a remainder.
        return torch.where(position >= padded, position - padded, position)

    slots = torch.arange(num_windows, device=device)[:, None] * window_size + torch.arange(window_size, device=device)
    band = (slots >= padded - window_size).to(torch.int64) + (slots >= padded - shift).to(torch.int64)
    rolled = wrap(torch.arange(side, device=device) + (padded - shift))
    window, slot = torch.div(rolled, window_size, rounding_mode='floor'), torch.remainder(rolled, window_size)
    return _Axis(num_windows, wrap(slots + shift), band, window, slot)


def _gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows (R, C) of ``x`` at an index of any shape: (*index.shape, C)."""
    return x.index_select(0, index.reshape(-1)).reshape(*index.shape, x.shape[-1])
