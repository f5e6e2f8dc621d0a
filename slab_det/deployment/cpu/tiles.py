"""Cuts maps into tiles of whole windows, small enough that the results of a tile stay in the CPU cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from slab_det.attention.geometry import Windows, join_groups, mask_regions, split_qkv
from slab_det.deployment.window_index import WindowIndex

# glibc reuses freed memory for the results of a tile, but requests new pages for each result of a whole map
# (docs/latency.md, Memory). With smaller tiles, the additional calls cost more time than they save.
TILE_TOKENS = 2048


@dataclass(frozen=True, eq=False)
class WindowTile(Windows):
    """Some windows of one map.

    Attributes:
        window_size: Side w of a window; N = w * w slots.
        num_windows: Windows m of the tile.
        tokens: Index of the token in each slot that is not padding, (n,).
        slots: Slot of each of these tokens in the tile, (n,); None if no slot is padding.
        regions: Region of each slot, (m, N), see WindowIndex.regions; None if the tile needs no mask.
    """

    window_size: int
    num_windows: int
    tokens: Tensor
    slots: Tensor | None
    regions: Tensor | None

    def cut(self, x: Tensor, attention: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        qkv = attention.qkv(x)
        if self.slots is not None:
            rows = attention.padding_row().to(qkv.dtype).repeat(self.num_windows * self.window_size**2, 1)
            qkv = rows.index_copy_(0, self.slots, qkv)
        return split_qkv(qkv.view(self.num_windows, self.window_size**2, -1), attention.groups)

    def merge(self, windows: Tensor) -> Tensor:
        rows = join_groups(windows).flatten(0, 1)
        return rows if self.slots is None else rows.index_select(0, self.slots)

    def attention_mask(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.regions is None else mask_regions(self.regions, dtype)


# 32 image sizes of a Swin with eight kinds of blocks: 70 MB at 800x1333.
@lru_cache(maxsize=256)
# Cached tensors must also serve callers outside of inference mode.
@torch.inference_mode(False)
def window_tiles(
    height: int, width: int, window_size: int, shift: int, max_tokens: int, device: torch.device
) -> list[WindowTile]:
    """Groups the windows of a (height, width) map into tiles; tiles are cached by size.

    Windows within one region come first, in separate tiles, which need no mask.

    Args:
        height: Rows of the map, in tokens.
        width: Columns of the map, in tokens.
        window_size: Side of a window.
        shift: Cyclic shift towards the top left.
        max_tokens: Largest number of slots of a tile; a tile holds at least one window.
        device: Where the index tensors live.
    """
    index = WindowIndex(height, width, window_size, shift, device)
    regions = index.regions()
    windows = torch.arange(len(index.tokens), device=device)
    mixed = torch.zeros_like(windows, dtype=torch.bool) if regions is None else (regions != regions[:, :1]).any(1)
    tiles = []
    for masked in (False, True):
        for part in windows[mixed == masked].split(max(1, max_tokens // window_size**2)):
            if part.numel():
                tokens = index.tokens[part].flatten()
                is_token = tokens < height * width
                slots = None if is_token.all() else is_token.nonzero().flatten()
                tokens = tokens if slots is None else tokens[slots]
                tiles.append(WindowTile(window_size, part.numel(), tokens, slots, regions[part] if masked else None))
    return tiles


def row_tiles(num_rows: int, max_rows: int) -> Iterator[slice]:
    """Slices of at most ``max_rows`` that cover ``num_rows``."""
    return (slice(start, start + max_rows) for start in range(0, num_rows, max_rows))
