"""Windows for devices that wait for launches: one gather cuts q, k and v together, where training cuts them apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor, nn

from slab_det.attention import ShiftedWindowAttention, WindowGeometry
from slab_det.attention.geometry import Windows, join_groups, mask_regions, split_qkv
from slab_det.deployment.window_index import WindowIndex


class GatheredWindows(Windows):
    """The windows of one map, for inference; arguments as for WindowIndex, whose indices it keeps."""

    def __init__(self, height: int, width: int, window_size: int, shift: int, device: torch.device) -> None:
        index = WindowIndex(height, width, window_size, shift, device)
        self.window_size, self.num_windows = window_size, len(index.tokens)
        tokens = index.tokens.flatten()
        self.padding_slots = torch.nonzero(tokens == height * width).flatten()
        self.tokens = tokens.clamp(max=height * width - 1)
        window, slot = index.places()
        self.slots = window * window_size**2 + slot
        self.regions = index.regions()
        self.kept: dict[str, Tensor] = {}

    def cut(self, qkv: Tensor, padding: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = qkv.index_select(1, self.tokens)
        if self.padding_slots.numel():
            rows.index_copy_(
                1, self.padding_slots, padding.to(rows.dtype).expand(len(rows), len(self.padding_slots), -1)
            )
        return split_qkv(rows.view(len(rows) * self.num_windows, self.window_size**2, -1), groups)

    def merge(self, windows: Tensor) -> Tensor:
        return join_groups(windows).unflatten(0, (-1, self.num_windows)).flatten(1, 2).index_select(1, self.slots)

    def attention_mask(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.regions is None else mask_regions(self.regions, dtype)

    def keep(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]


# The indices of a size, for all attentions.
_windows = lru_cache(maxsize=64)(GatheredWindows)


class WindowGatherer:
    """Makes the windows of one attention; its weights' tensors are kept for the size that it met last."""

    def __init__(self) -> None:
        self._last: GatheredWindows | None = None

    def __call__(self, *arguments: object) -> Windows:
        # torch.compile traces through cached functions, and cannot trace `nonzero`.
        if torch.compiler.is_compiling():
            return WindowGeometry(*arguments)
        # Another thread may replace the last one at any moment.
        windows, last = _windows(*arguments), self._last
        if last is None or last.tokens is not windows.tokens:
            last = self._last = copy.copy(windows)
            last.kept = {}
        return last

    def __reduce__(self) -> tuple:
        # Copies and files make the tensors again.
        return WindowGatherer, ()


def gather_windows(backbone: nn.Module) -> None:
    """Has window attentions cut q, k and v with one gather."""
    for module in backbone.modules():
        if isinstance(module, ShiftedWindowAttention) and module.make_windows is WindowGeometry:
            module.make_windows = WindowGatherer()
