"""Windows for devices that wait for launches: one gather cuts q, k and v together, where training cuts them apart."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from slab_det.attention.geometry import WindowGeometry, split_qkv, window_geometry


@dataclass(frozen=True, eq=False)
class GatheredWindows(WindowGeometry):
    """The windows of one map, for inference."""

    def cut(self, qkv: Tensor, padding: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
        batch, length, _ = qkv.shape
        index, _, slots = self.over_batch(batch)
        rows = qkv.reshape(batch * length, -1).index_select(0, index)
        if slots.numel():
            rows.index_copy_(0, slots, padding.to(rows.dtype).expand(slots.numel(), -1))
        return split_qkv(rows.view(batch * self.num_windows, self.window_size**2, -1), groups)


def gathered_windows(height: int, width: int, window_size: int, shift: int, device: torch.device) -> GatheredWindows:
    """The windows of a (height, width) map, computed once per size; arguments as for ``window_geometry``."""
    if torch.compiler.is_compiling():
        return GatheredWindows(*_constant_fields(height, width, window_size, shift, device))
    return _cached_windows(height, width, window_size, shift, device)


@lru_cache(maxsize=64)
def _cached_windows(*arguments: object) -> GatheredWindows:
    return GatheredWindows(*_constant_fields(*arguments))


# torch.compile traces through cached functions, unless their result is declared a constant of numbers and tensors.
@torch.compiler.assume_constant_result
def _constant_fields(*arguments: object) -> tuple:
    return tuple(vars(window_geometry(*arguments)).values())
