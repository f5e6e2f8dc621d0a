"""Position tables of another window or image size are interpolated."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from slab_det.attention.geometry import resize_table
from slab_det.checkpoints.layouts import Weight, Weights
from slab_det.runtime.errors import CheckpointError

CHANGE = 'position table interpolated'


def resize_tables(weights: Weights, model: nn.Module) -> Weights:
    """Fits relative position biases and position embeddings to the sizes that the model has.

    Swin's tables bicubically, as its authors do; PVT's bilinearly, as they are at run time for every size of image.

    Args:
        weights: Weights in the model's layout.
        model: Where they will go; left as it is.

    Raises:
        CheckpointError: If the table's rows are those of no square and the model's are others, or what shape the
            model's have cannot be known.
    """
    targets = model.state_dict()
    resized = dict(weights)
    for key, weight in weights.items():
        target, table = targets.get(key), weight.value
        if target is None or target.shape == table.shape or target.ndim != table.ndim:
            continue
        if key.endswith('.relative_position_bias_table'):  # (M * M, heads), M = 2 w - 1
            value = _resize_bicubic(weight, table[None], key, target.shape[0])[0]
        elif key.endswith('.w_msa.positional_encoding'):  # (1, M * M, C)
            value = _resize_bicubic(weight, table, key, target.shape[1])
        elif key.endswith(('.attn.positional_encoding', '.pos_embed')):  # (1, H * W, C)
            old, new = _side(table.shape[1], weight.key), _map_shape(model, key, target.shape[1])
            value = resize_table(_at_least_float32(table), (old, old), new).to(table.dtype)
        else:
            continue
        resized[key] = weight.changed(value, CHANGE)
    return resized


def _resize_bicubic(weight: Weight, table: Tensor, key: str, length: int) -> Tensor:
    """Bicubic interpolation of (1, M * M, C) to (1, length, C)."""
    old, new = _side(table.shape[1], weight.key), _side(length, key)
    image = _at_least_float32(table).transpose(1, 2).unflatten(2, (old, old))
    image = F.interpolate(image, (new, new), mode='bicubic', align_corners=False)
    return image.flatten(2).transpose(1, 2).to(table.dtype)


def _map_shape(model: nn.Module, key: str, length: int) -> tuple[int, int]:
    """(H, W) of one of the model's own tables: what its module says, or a square."""
    module = model.get_submodule(key.rpartition('.')[0])
    for name in ('pos_shape', 'table_shape'):
        if hasattr(module, name):
            height, width = getattr(module, name)
            return int(height), int(width)
    side = _side(length, key)
    return side, side


def _side(length: int, key: str) -> int:
    side = math.isqrt(length)
    if side * side != length:
        raise CheckpointError(
            f'{key} has {length} positions, which make no square: how to interpolate them cannot be known; give the '
            'model the image and window sizes that the checkpoint was trained with'
        )
    return side


def _at_least_float32(table: Tensor) -> Tensor:
    # Half precision has no interpolation on every device.
    return table if table.dtype.itemsize >= 4 else table.float()
