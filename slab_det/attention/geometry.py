"""Windows and maps: the layout of the tokens in an attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Added to the logits of pairs that the shift brought together (Swin, Liu et al., ICCV 2021).
MASKED_LOGIT = -100.0


def resize_table(
    table: Tensor, table_shape: tuple[int, int], hw_shape: tuple[int, int], mode: str = 'bilinear'
) -> Tensor:
    """Interpolates a table of positions (1, H0 * W0, C) to a map of (H, W): (1, H * W, C)."""
    # A compiled graph must not depend on this comparison. Interpolation to the same size changes nothing.
    if not torch.compiler.is_compiling() and tuple(hw_shape) == tuple(table_shape):
        return table
    image = table.unflatten(1, table_shape).permute(0, 3, 1, 2)
    return F.interpolate(image, hw_shape, mode=mode, align_corners=False).flatten(2).transpose(1, 2)


class Geometry(ABC):
    """Base class of token layouts: what :meth:`Attention.mix` asks about the positions of queries and keys.

    :class:`WindowGeometry` and :class:`MapGeometry` serve training and a CPU, :mod:`slab_det.attention.window_index`
    serves export.

    Attributes:
        query_shape: (H, W) of the window or map of the queries.
    """

    query_shape: tuple[int, int]

    def attention_mask(self, dtype: torch.dtype) -> Tensor | None:
        """An additive mask of the logits, (nW, N, N): -100 for pairs from different regions, otherwise 0; or None."""
        return None

    def fit_table(self, table: Tensor, table_shape: tuple[int, int]) -> Tensor:
        """Resizes a table of positions (1, H0 * W0, C) to one row for each key, (1, M, C)."""
        return table

    def values_at_queries(self, v: Tensor) -> Tensor:
        """Resizes the values (B, M, C) to the positions of the queries, (B, N, C)."""
        return v


class Windows(Geometry):
    """The tokens of a map, padded at the bottom right, shifted cyclically and cut into windows of N = w * w slots."""

    # Side w of a window.
    window_size: int

    @property
    def query_shape(self) -> tuple[int, int]:
        return self.window_size, self.window_size

    @abstractmethod
    def cut(self, x: Tensor, attention: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        """Projects the tokens of a map and cuts queries, keys and values into windows.

        Args:
            x: (B, H * W, C).
            attention: A :class:`~slab_det.attention.WindowAttention`: its projection, and its q, k and v of padding.

        Returns:
            q, k and v, (B * nW, g, N, C / g) each, for the g groups of the attention.
        """

    @abstractmethod
    def merge(self, windows: Tensor) -> Tensor:
        """Puts windows (B * nW, g, N, C / g) back into the map (B, H * W, C); padding slots are dropped."""


def split_groups(x: Tensor, groups: int) -> Tensor:
    """(B, N, C) -> (B, g, N, C / g), a view."""
    return x.unflatten(-1, (groups, -1)).transpose(1, 2)


def split_qkv(x: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, N, 3C) -> q, k and v, (B, g, N, C / g) each, views."""
    return x.unflatten(-1, (3, groups, -1)).permute(2, 0, 3, 1, 4).unbind()


def join_groups(x: Tensor) -> Tensor:
    """(B, g, N, C / g) -> (B, N, C)."""
    return x.transpose(1, 2).flatten(2)


def repeat_windows(x: Tensor, count: int) -> Tensor:
    """Repeats (nW, ...), one entry per window of a map, for the ``count`` windows of a batch; keeps (1, ...)."""
    return x if x.shape[0] in (1, count) else x.repeat(count // x.shape[0], *[1] * (x.ndim - 1))


@dataclass(frozen=True)
class MapGeometry(Geometry):
    """A whole map. Its keys and values may come from a reduced map of (H', W')."""

    query_shape: tuple[int, int]
    source_shape: tuple[int, int]
    is_reduced: bool

    def fit_table(self, table: Tensor, table_shape: tuple[int, int]) -> Tensor:
        return resize_table(table, table_shape, self.source_shape)

    def values_at_queries(self, v: Tensor) -> Tensor:
        return resize_table(v, self.source_shape, self.query_shape) if self.is_reduced else v


@dataclass(frozen=True)
class WindowGeometry(Windows):
    """The windows of a (H, W) map of any size, cut by padding, rolling and reshaping it.

    Attributes:
        height: Rows H of the map, in tokens.
        width: Columns W of the map.
        window_size: Side w of a window; a map has nW = ceil(H / w) * ceil(W / w) of them.
        shift: Cyclic shift towards the top left, in tokens, below ``window_size``.
        device: Where the map lies.
    """

    height: int
    width: int
    window_size: int
    shift: int
    device: torch.device

    def cut(self, x: Tensor, attention: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
        qkv = attention.qkv(self._to_windows(x.unflatten(1, (self.height, self.width))))
        if attention.padding_qkv is not None:
            self._fill_padding(qkv, attention.padding_qkv)
        return split_qkv(qkv, attention.groups)

    def merge(self, windows: Tensor) -> Tensor:
        rows, columns = (-(-side // self.window_size) for side in (self.height, self.width))
        x = windows.unflatten(2, self.query_shape).unflatten(0, (-1, rows, columns))
        image = x.permute(0, 1, 4, 2, 5, 3, 6).flatten(5).flatten(3, 4).flatten(1, 2)
        if self.shift:
            image = image.roll((self.shift, self.shift), (1, 2))
        return image[:, : self.height, : self.width].flatten(1, 2)

    def attention_mask(self, dtype: torch.dtype) -> Tensor | None:
        if not self.shift:
            return None
        sides = (-(-side // self.window_size) * self.window_size for side in (self.height, self.width))
        rows, columns = (torch.arange(side, device=self.device) for side in sides)
        # Three bands of rows and of columns: the windows before the last one, the first part of the last window, and
        # its second part, which came from the other side of the map.
        rows, columns = (
            (i >= len(i) - self.window_size).long() + (i >= len(i) - self.shift).long() for i in (rows, columns)
        )
        regions = self._partition((rows[:, None] * 3 + columns)[None, :, :, None])
        return mask_regions(regions[:, :, 0], dtype)

    def _to_windows(self, image: Tensor) -> Tensor:
        """Pads a map (B, H, W, C) with zeros, shifts it and cuts it into windows, (B * nW, N, C)."""
        bottom, right = -self.height % self.window_size, -self.width % self.window_size
        if bottom or right:
            image = F.pad(image, (0, 0, 0, right, 0, bottom))
        if self.shift:
            image = image.roll((-self.shift, -self.shift), (1, 2))
        return self._partition(image)

    def _fill_padding(self, qkv: Tensor, row: Tensor) -> None:
        """Writes ``row``, (3C,), into the padding slots of windows (B * nW, N, 3C), in place."""
        size = self.window_size
        rows, columns = -(-self.height // size), -(-self.width // size)
        slots = qkv.view(-1, rows, columns, size, size, len(row))
        # Below 0 these are positions at the end: the shift has wrapped the map around.
        for y in range(self.height - self.shift, rows * size - self.shift):
            slots[:, y // size, :, y % size] = row
        for x in range(self.width - self.shift, columns * size - self.shift):
            slots[:, :, x // size, :, x % size] = row

    def _partition(self, image: Tensor) -> Tensor:
        """(B, H', W', C) of whole windows -> (B * nW, N, C)."""
        sides = (-1, self.window_size)
        return image.unflatten(2, sides).unflatten(1, sides).transpose(2, 3).flatten(3, 4).flatten(0, 2)


def mask_regions(regions: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask (nW, N, N) of windows, from the region number of each slot, (nW, N)."""
    return (regions[:, :, None] != regions[:, None, :]).to(dtype) * MASKED_LOGIT
