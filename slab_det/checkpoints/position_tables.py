"""Interpolates position tables of another window or image size."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from slab_det.checkpoints.layouts import Weights
from slab_det.runtime.errors import CheckpointError


def resize_tables(weights: Weights, model: nn.Module) -> Weights:
    """Interpolates relative position biases and position embeddings to the sizes that the model has.

    Swin's tables are interpolated bicubically, as by its authors; PVT's bilinearly, as PVT does in every forward.
    CheckpointError is raised if the positions of a table make no square.
    """
    targets = model.state_dict()
    resized = dict(weights)
    for key, weight in weights.items():
        owner, _, name = key.rpartition('.')
        target, table = targets.get(key), weight.value
        is_table = name in ('relative_position_bias_table', 'positional_encoding', 'pos_embed')
        if not is_table or target is None or target.shape == table.shape or target.ndim != table.ndim:
            continue
        # (M * M, heads), M = 2 w - 1, or (1, H * W, C).
        side, module = _side(table.shape[-2], weight.key), model.get_submodule(owner)
        shape = None if table.ndim == 2 else getattr(module, 'pos_shape', getattr(module, 'table_shape', None))
        shape = [_side(target.shape[-2], key)] * 2 if shape is None else [int(size) for size in shape]
        # Not every device interpolates in half precision.
        image = table.to(torch.promote_types(table.dtype, torch.float32)).mT.unflatten(-1, (side, side))
        mode = 'bicubic' if owner.endswith('.w_msa') else 'bilinear'
        image = F.interpolate(image.view(1, -1, side, side), shape, mode=mode, align_corners=False)
        value = image.flatten(2).mT.to(table.dtype).reshape(*target.shape[:-1], table.shape[-1])
        resized[key] = weight.changed(value, 'position table interpolated')
    return resized


def _side(length: int, key: str) -> int:
    side = math.isqrt(length)
    if side * side != length:
        raise CheckpointError(
            f'{key} has {length} positions, which make no square: how to interpolate them cannot be known; give the '
            'model the image and window sizes that the checkpoint was trained with'
        )
    return side
