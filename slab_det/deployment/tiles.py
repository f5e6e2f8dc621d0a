"""A map cut into tiles of whole windows, small enough that a tile's intermediate results stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from slab_det.attention.geometry import MASKED_LOGIT, WindowGeometry, window_geometry

# What a tile computes is small enough for glibc to keep; of whole maps every intermediate result is a new allocation,
# to be paged in anew (docs/deploy.md, Memory). Smaller tiles cost more calls than they save.
CPU_TILE_TOKENS = 2048


def tile_tokens(device: torch.device) -> int | None:
    """Tokens of a tile; None for the whole map: other devices wait for launches, and tiles are more of them."""
    return CPU_TILE_TOKENS if device.type == 'cpu' else None


@dataclass(frozen=True, eq=False)
class WindowTile:
    """m windows of a map, N slots each.

    Attributes:
        num_windows: m.
        num_slots: m * N.
        tokens: The map's token in each slot that holds one, (n,).
        slots: Which slots of the tile those are, (n,); None for all.
        regions: (m, N), see :class:`~slab_det.attention.geometry.WindowGeometry`; None where each window lies in one
            region.
    """

    num_windows: int
    num_slots: int
    tokens: Tensor
    slots: Tensor | None
    regions: Tensor | None

    def spread(self, rows: Tensor, padding: Tensor | None) -> Tensor:
        """Rows of the tokens (n, C) in their slots (m * N, C); the others hold ``padding`` (C,), None for zero."""
        if self.slots is None:
            return rows
        row = rows.new_zeros(rows.shape[1]) if padding is None else padding.to(rows.dtype)
        return row.repeat(self.num_slots, 1).index_copy_(0, self.slots, rows)

    def collect(self, rows: Tensor) -> Tensor:
        """What :meth:`spread` had: the rows of the tokens, out of the slots (m * N, C)."""
        return rows if self.slots is None else rows.index_select(0, self.slots)

    def attention_mask(self, dtype: torch.dtype) -> Tensor:
        """The additive mask (m, N, N): 0 within a region, -100 across."""
        apart = self.regions[:, :, None] != self.regions[:, None, :]
        return apart.to(dtype) * MASKED_LOGIT

    def padding_mask(self) -> Tensor:
        """True in slots that hold padding, (m, N)."""
        mask = torch.ones(self.num_slots, dtype=torch.bool, device=self.tokens.device)
        return mask.index_fill_(0, self.slots, False).view(self.num_windows, -1)


def window_tiles(
    height: int, width: int, window_size: int, shift: int, masked: bool, max_tokens: int | None, device: torch.device
) -> list[WindowTile]:
    """All windows of a (height, width) map in tiles; what they hold is computed once per size.

    Windows of one region come first, in tiles of their own, which need no mask.

    Args:
        height: Rows of the map, in tokens.
        width: Columns of the map, in tokens.
        window_size: Side of a window, in tokens.
        shift: Cyclic shift towards the top left, in tokens.
        masked: Whether tokens of different regions must not see each other.
        max_tokens: Slots of a tile, which holds one window at least; None for one tile.
        device: Where the index tensors live.
    """
    fields = _constant_fields(height, width, window_size, shift, masked and shift > 0, max_tokens, device)
    return [WindowTile(*values) for values in fields]


# torch.compile traces through cached functions, unless their result is declared a constant of numbers and tensors.
@torch.compiler.assume_constant_result
def _constant_fields(*arguments: object) -> list[tuple]:
    return _tile_fields(*arguments)


@lru_cache(maxsize=64)
def _tile_fields(
    height: int, width: int, window_size: int, shift: int, masked: bool, max_tokens: int | None, device: torch.device
) -> list[tuple]:
    # Cached tensors outlive the mode they were made in.
    with torch.inference_mode(False), torch.no_grad():
        geometry = window_geometry(height, width, window_size, shift, device)
        windows = torch.arange(geometry.num_windows, device=device)
        if max_tokens is None:
            return [_fields(geometry, windows, masked)]
        mixed = torch.zeros_like(windows, dtype=torch.bool)
        if masked:
            mixed = (geometry.regions != geometry.regions[:, :1]).any(1)
        size = max(1, max_tokens // window_size**2)
        return [
            _fields(geometry, part, in_parts)
            for in_parts in (False, True)
            for part in windows[mixed == in_parts].split(size)
            if part.numel()
        ]


def _fields(geometry: WindowGeometry, windows: Tensor, masked: bool) -> tuple:
    is_token = torch.ones_like(geometry.index, dtype=torch.bool).index_fill_(0, geometry.padding_slots, False)
    index, is_token = (x.view(geometry.num_windows, -1)[windows].flatten() for x in (geometry.index, is_token))
    slots = None if is_token.all() else is_token.nonzero().flatten()
    tokens = index if slots is None else index[slots]
    return windows.numel(), index.numel(), tokens, slots, geometry.regions[windows] if masked else None


def row_tiles(num_rows: int, max_rows: int | None) -> Iterator[slice]:
    """Slices of at most ``max_rows`` that cover ``num_rows``; None for one."""
    step = max_rows or max(num_rows, 1)
    return (slice(start, start + step) for start in range(0, num_rows, step))
