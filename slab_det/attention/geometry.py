"""Geometry: what an attention needs to know about the tokens that it mixes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Added to the logits of pairs that the shift brought together (Swin, Liu et al., ICCV 2021; their value).
MASKED_LOGIT = -100.0


def resize_table(
    table: Tensor, table_shape: tuple[int, int], hw_shape: tuple[int, int], mode: str = 'bilinear'
) -> Tensor:
    """Interpolates a table of positions (1, H0 * W0, C) to a map of (H, W): (1, H * W, C).

    Bilinear, as PVT does: unlike bicubic, as Swin does, it never leaves the range of the rows that were learned.
    """
    # A comparison of sizes would tie an exported model to them, and interpolation to the same size changes nothing.
    if not torch.compiler.is_compiling() and tuple(hw_shape) == tuple(table_shape):
        return table
    image = table.unflatten(1, table_shape).permute(0, 3, 1, 2)
    return F.interpolate(image, hw_shape, mode=mode, align_corners=False).flatten(2).transpose(1, 2)


class Geometry(ABC):
    """What the mathematics of an attention may ask about the tokens that it mixes.

    :class:`WindowGeometry` and :class:`MapGeometry` answer in training, :mod:`slab_det.deployment.tiles` in deployment
    on a CPU, :mod:`slab_det.deployment.gather` on a GPU, :mod:`slab_det.deployment.export.token_index` in export.

    Attributes:
        query_shape: (H, W) of the window or map of the queries.
    """

    query_shape: tuple[int, int]

    def attention_mask(self, dtype: torch.dtype) -> Tensor | None:
        """An additive mask of the logits, (nW, N, N): 0 within a region of the map, -100 across; None for none."""
        return None

    def fit_table(self, table: Tensor, table_shape: tuple[int, int]) -> Tensor:
        """A learned table of positions (1, H0 * W0, C) with one row for each key, (1, M, C)."""
        return table

    def values_at_queries(self, v: Tensor) -> Tensor:
        """The values (B, M, C) at the places of the queries, (B, N, C)."""
        return v

    def keep(self, owner: nn.Module, weight: Tensor, dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
        """Returns ``make()``, or what it returned before for this geometry, ``weight`` and ``dtype``.

        Args:
            owner: The attention. Its attribute ``kept``, None at first, may hold the tensor.
            weight: The parameter that the tensor is made of.
            dtype: Of the tensor.
            make: Makes the tensor.
        """
        return make()

    def share(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """Returns ``make()``, computed once per forward for all queries of a map."""
        return make()

    def of_queries(self, x: Tensor) -> Tensor:
        """Selects the rows of this geometry's queries from a tensor (B, N, C) with one row per query of the map."""
        return x


class Windows(Geometry):
    """The tokens of a map, padded at the bottom right, shifted cyclically and cut into windows of N = w * w slots."""

    # Side w of a window.
    window_size: int

    @property
    def query_shape(self) -> tuple[int, int]:
        return self.window_size, self.window_size

    @abstractmethod
    def cut(self, qkv: Tensor, padding: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        """Cuts the queries, keys and values of a map into windows.

        Args:
            qkv: (B, H * W, 3C).
            padding: What padding slots hold, (3C,).
            groups: Groups g of channels to set apart.

        Returns:
            q, k and v, (B * nW, g, N, C / g) each.
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
    """Repeats a tensor (nW, ...) of the windows of one map for the ``count`` windows of a batch; (1, ...) stays."""
    return x if x.shape[0] in (1, count) else x.repeat(count // x.shape[0], *[1] * (x.ndim - 1))


@dataclass(frozen=True)
class MapGeometry(Geometry):
    """A whole map whose keys and values may come from a reduced map, of (H', W')."""

    query_shape: tuple[int, int]
    source_shape: tuple[int, int]
    is_reduced: bool

    def fit_table(self, table: Tensor, table_shape: tuple[int, int]) -> Tensor:
        return resize_table(table, table_shape, self.source_shape)

    def values_at_queries(self, v: Tensor) -> Tensor:
        return resize_table(v, self.source_shape, self.query_shape) if self.is_reduced else v


class _SelectRows(torch.autograd.Function):
    """Row selection whose backward is again a selection: every source row is used exactly once.

    The generic backward would be an index_add, slower, and not deterministic on a GPU.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, index: Tensor, inverse: Tensor, unused: Tensor
    ) -> Tensor:
        ctx.save_for_backward(inverse, unused)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        inverse, unused = ctx.saved_tensors
        grad = grad.index_select(0, inverse)
        if unused.numel():
            grad.index_fill_(0, unused, 0)
        return grad, None, None, None


def _select_rows(rows: Tensor, index: Tensor, inverse: Tensor, unused: Tensor) -> Tensor:
    if torch.is_grad_enabled():
        return _SelectRows.apply(rows, index, inverse, unused)
    return rows.index_select(0, index)


@dataclass(frozen=True, eq=False)
class WindowGeometry(Windows):
    """The windows of one (H, W) map, as index tensors that are computed once per size.

    Attributes:
        window_size: Side w of a window.
        num_windows: nW = ceil(H / w) * ceil(W / w).
        index: The token in each slot, (nW * N,); 0 in slots of padding.
        inverse: The slot of each token, (H * W,).
        padding_slots: The slots that hold padding.
        regions: The region of the shifted map that each slot came from, (nW, N); None without a shift. Attention stays
            inside a region.
    """

    window_size: int
    num_windows: int
    index: Tensor
    inverse: Tensor
    padding_slots: Tensor
    regions: Tensor | None

    def cut(self, qkv: Tensor, padding: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = qkv.shape
        index, inverse, slots = self.over_batch(batch)
        parts = []
        for part, row in zip(qkv.chunk(3, dim=-1), padding.chunk(3), strict=True):
            rows = _select_rows(part.reshape(batch * length, -1), index, inverse, slots[:0])
            if slots.numel():
                rows = rows.index_copy_(0, slots, row.to(rows.dtype).expand(slots.numel(), -1))
            parts.append(split_groups(rows.view(batch * self.num_windows, -1, rows.shape[1]), groups))
        return tuple(parts)

    def merge(self, windows: Tensor) -> Tensor:
        batch = windows.shape[0] // self.num_windows
        index, inverse, slots = self.over_batch(batch)
        return _select_rows(join_groups(windows).flatten(0, 1), inverse, index, slots).unflatten(0, (batch, -1))

    def over_batch(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """``index``, ``inverse`` and ``padding_slots`` of all maps of a batch, one after the other."""
        if batch == 1:
            return self.index, self.inverse, self.padding_slots
        image = torch.arange(batch, device=self.index.device)[:, None]
        tokens, slots = image * self.inverse.numel(), image * self.index.numel()
        return tuple(
            (offset + places).flatten()
            for offset, places in ((tokens, self.index), (slots, self.inverse), (slots, self.padding_slots))
        )

    def attention_mask(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.regions is None else mask_regions(self.regions, dtype)

    def keep(self, owner: nn.Module, weight: Tensor, dtype: torch.dtype, make: Callable[[], Tensor]) -> Tensor:
        needs_gradient = torch.is_grad_enabled() and weight.requires_grad
        if owner.training or needs_gradient or torch.compiler.is_compiling():
            return make()
        # Only the last size is kept: masks of large maps take tens of megabytes in each block.
        # Autograd refuses what was made in inference mode.
        key = self, dtype, None if weight.is_inference() else weight._version, torch.is_inference_mode_enabled()
        # The weight is kept too: torch.func.functional_call frees one table, and the next may get its id.
        # Another thread may replace what is kept at any moment.
        kept = owner.kept
        if kept is None or kept[0] is not weight or kept[1] != key:
            kept = owner.kept = weight, key, make()
        return kept[2]


def mask_regions(regions: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask (nW, N, N) of windows whose slots come from the regions (nW, N)."""
    return (regions[:, :, None] != regions[:, None, :]).to(dtype) * MASKED_LOGIT


@lru_cache(maxsize=64)
def window_geometry(height: int, width: int, window_size: int, shift: int, device: torch.device) -> WindowGeometry:
    """The windows of a (height, width) map, computed once per size.

    All sizes count tokens; ``shift`` is a cyclic shift towards the top left, below ``window_size``.
    """
    # Cached tensors outlive the mode they were made in, and autograd refuses inference tensors.
    with torch.inference_mode(False), torch.no_grad():
        num_rows, num_columns = -(-height // window_size), -(-width // window_size)
        padded = num_rows * window_size, num_columns * window_size
        num_tokens, num_windows = height * width, num_rows * num_columns

        def cut(image: Tensor) -> Tensor:
            image = image.reshape(num_rows, window_size, num_columns, window_size)
            return image.permute(0, 2, 1, 3).reshape(num_windows, -1)

        tokens = torch.full(padded, -1, dtype=torch.long, device=device)
        tokens[:height, :width] = torch.arange(num_tokens, device=device).view(height, width)
        index = cut(tokens.roll((-shift, -shift), (0, 1))).flatten()
        padding = index < 0
        inverse = torch.empty(num_tokens, dtype=torch.long, device=device)
        inverse[index[~padding]] = torch.nonzero(~padding).flatten()
        slots = torch.nonzero(padding).flatten()
        regions = None
        if shift:
            # Rows and columns of the rolled map fall into three bands each: untouched, kept, wrapped around.
            places = (torch.arange(n, device=device) for n in padded)
            rows, columns = ((i >= len(i) - window_size).long() + (i >= len(i) - shift).long() for i in places)
            regions = cut(rows[:, None] * 3 + columns)
        return WindowGeometry(window_size, num_windows, index.clamp(min=0), inverse, slots, regions)
