"""A map cut into tiles of whole windows, small enough that a tile's results stay in the cache of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from slab_det.attention.geometry import (
    MapGeometry,
    Windows,
    join_groups,
    mask_regions,
    split_qkv,
)
from slab_det.deployment.window_index import WindowIndex

# What a tile computes is small enough for glibc to keep; of whole maps every intermediate result is a new allocation,
# to be paged in anew (docs/measuring.md, Memory). Smaller tiles cost more calls than they save.
TILE_TOKENS = 2048


@dataclass(frozen=True, eq=False)
class WindowTile(Windows):
    """Some windows of one map, for one forward of one attention.

    Attributes:
        window_size: Side w of a window; N = w * w slots.
        num_windows: Windows m of the tile.
        tokens: The map's token in each slot that holds one, (n,).
        slots: The slots of the tile that hold these tokens, (n,); None for all.
        kept: The tensors that :meth:`keep` made; tiles without regions share them.
        regions: (m, N), as in WindowIndex; None where each window lies in one region.
    """

    window_size: int
    num_windows: int
    tokens: Tensor
    slots: Tensor | None
    kept: dict[str, Tensor]
    regions: Tensor | None

    def cut(self, qkv: Tensor, padding: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        if self.slots is not None:
            rows = padding.to(qkv.dtype).repeat(self.num_windows * self.window_size**2, 1)
            qkv = rows.index_copy_(0, self.slots, qkv)
        return split_qkv(qkv.view(self.num_windows, self.window_size**2, -1), groups)

    def merge(self, windows: Tensor) -> Tensor:
        rows = join_groups(windows).flatten(0, 1)
        return rows if self.slots is None else rows.index_select(0, self.slots)

    def attention_mask(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.regions is None else mask_regions(self.regions, dtype)

    def keep(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        return _get_or_make(self.kept, name, make)


def window_tiles(
    height: int, width: int, window_size: int, shift: int, max_tokens: int, device: torch.device
) -> list[WindowTile]:
    """All windows of a (height, width) map in tiles; where their tokens lie is computed once per size.

    Windows of one region come first, in tiles of their own, which need no mask.

    Args:
        height: Rows of the map, in tokens, as all sizes here.
        width: Columns of the map.
        window_size: Side of a window.
        shift: Cyclic shift towards the top left.
        max_tokens: Slots of a tile, which holds one window at least.
        device: Where the index tensors live.
    """
    shared = {}
    fields = _constant_fields(height, width, window_size, shift, max_tokens, device)
    return [WindowTile(window_size, *values, shared if regions is None else {}, regions) for *values, regions in fields]


# torch.compile traces through cached functions, unless their result is declared a constant of numbers and tensors.
@torch.compiler.assume_constant_result
def _constant_fields(*arguments: object) -> list[tuple]:
    return _tile_fields(*arguments)


@lru_cache(maxsize=64)
def _tile_fields(
    height: int, width: int, window_size: int, shift: int, max_tokens: int, device: torch.device
) -> list[tuple]:
    # Cached tensors outlive the mode they were made in.
    with torch.inference_mode(False), torch.no_grad():
        index = WindowIndex(height, width, window_size, shift, device)
        regions = index.regions()
        windows = torch.arange(len(index.tokens), device=device)
        mixed = torch.zeros_like(windows, dtype=torch.bool)
        if regions is not None:
            mixed = (regions != regions[:, :1]).any(1)
        size = max(1, max_tokens // window_size**2)
        fields = []
        for masked in (False, True):
            for part in windows[mixed == masked].split(size):
                if part.numel():
                    tokens = index.tokens[part].flatten()
                    is_token = tokens < height * width
                    slots = None if is_token.all() else is_token.nonzero().flatten()
                    tokens = tokens if slots is None else tokens[slots]
                    fields.append((part.numel(), tokens, slots, regions[part] if masked else None))
        return fields


@dataclass(frozen=True, eq=False)
class MapTile(MapGeometry):
    """Some of the queries of a map, and all of its keys and values.

    Attributes:
        rows: The queries of the tile.
        shared: The tensors that :meth:`share` made, for all tiles of one forward.
    """

    rows: slice
    shared: dict[str, Tensor]

    def share(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        return _get_or_make(self.shared, name, make)

    def of_queries(self, x: Tensor) -> Tensor:
        return x[:, self.rows]


def _get_or_make(made: dict[str, Tensor], name: str, make: Callable[[], Tensor]) -> Tensor:
    if name not in made:
        made[name] = make()
    return made[name]


def row_tiles(num_rows: int, max_rows: int) -> Iterator[slice]:
    """Slices of at most ``max_rows`` that cover ``num_rows``."""
    return (slice(start, start + max_rows) for start in range(0, num_rows, max_rows))
