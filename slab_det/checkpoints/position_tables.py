"""Interpolates position tables of another window or image size."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from slab_det.checkpoints.layouts import Weights
from slab_det.common.errors import CheckpointError


def resize_tables(weights: Weights, model: nn.Module) -> Weights:
    """Interpolates relative position biases and position embeddings to the sizes that the model has.

    Swin's tables are interpolated bicubically, as by its authors; PVT's bilinearly, as PVT does in every forward.

    Raises:
        CheckpointError: If the number of positions in a table is no square.
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
        side = math.isqrt(table.shape[-2])
        if side * side != table.shape[-2]:
            raise CheckpointError(
                f'{weight.key} has {table.shape[-2]} positions, no square number, so their height and width are '
                'unknown; give the model the image and window sizes that the checkpoint was trained with'
            )
        module = model.get_submodule(owner)
        shape = None if table.ndim == 2 else getattr(module, 'pos_shape', getattr(module, 'table_shape', None))
        height, width = shape or [math.isqrt(target.shape[-2])] * 2
        # Not every device interpolates in half precision.
        image = table.to(torch.promote_types(table.dtype, torch.float32)).mT.reshape(1, -1, side, side)
        mode = 'bicubic' if owner.endswith('.w_msa') else 'bilinear'
        image = F.interpolate(image, (int(height), int(width)), mode=mode, align_corners=False)
        value = image.flatten(2).mT.to(table.dtype).reshape(*target.shape[:-1], table.shape[-1])
        resized[key] = weight.changed(value, 'position table interpolated')
    return resized
