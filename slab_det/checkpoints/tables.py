"""Position tables of another window or image size are interpolated."""
from __future__ import annotations

import math
from collections.abc import Mapping

import torch.nn.functional as F
from torch import Tensor

from .weight import Weights


def resize_tables(weights: Weights, targets: Mapping[str, Tensor]) -> Weights:
    """Fits relative position biases and position embeddings to the sizes that the model has.

    Args:
        weights: Weights in the model's layout.
        targets: The model's tensors.
    """
    resized = dict(weights)
    for key, weight in weights.items():
        target = targets.get(key)
        if target is None or target.shape == weight.value.shape or target.ndim != weight.value.ndim:
            continue
        if key.endswith('.relative_position_bias_table'):  # (M * M, heads), M = 2 w - 1
            value = _resize_square(weight.value[None], target.shape[0])
            value = None if value is None else value[0]
        elif key.endswith(('.positional_encoding', 'absolute_pos_embed')):  # (1, M * M, C)
            value = _resize_square(weight.value, target.shape[1])
        else:
            continue
        if value is not None and value.shape == target.shape:
            resized[key] = weight.changed(value, 'position table interpolated')
    return resized


def _resize_square(table: Tensor, length: int) -> Tensor | None:
    """Bicubic interpolation of (1, M * M, C) to (1, length, C); None where a side is no whole number."""
    old, new = math.isqrt(table.shape[1]), math.isqrt(length)
    if old * old != table.shape[1] or new * new != length:
        return None
    image = table.transpose(1, 2).unflatten(2, (old, old))
    # float32 or more: there is no bicubic kernel for half precision on every device.
    image = image if image.dtype.itemsize >= 4 else image.float()
    image = F.interpolate(image, (new, new), mode='bicubic', align_corners=False)
    return image.flatten(2).transpose(1, 2).to(table.dtype)
