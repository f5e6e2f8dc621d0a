"""Learned tables with one row per position of a map, at any size of the map."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def resize_table(table: Tensor, table_shape: tuple[int, int], hw_shape: tuple[int, int]) -> Tensor:
    """Interpolates a table of positions (1, H0 * W0, C) to a map: (1, H * W, C), as it is where the sizes agree.

    Bilinear, as PVT does: unlike bicubic it never leaves the range of the rows that were learned.

    Args:
        table: The table.
        table_shape: Its (H0, W0).
        hw_shape: The map's (H, W).
    """
    # A comparison of sizes would tie an exported model to them, and interpolation to the same size changes nothing.
    if not torch.compiler.is_compiling() and tuple(hw_shape) == tuple(table_shape):
        return table
    image = table.unflatten(1, table_shape).permute(0, 3, 1, 2)
    return F.interpolate(image, hw_shape, mode='bilinear', align_corners=False).flatten(2).transpose(1, 2)
