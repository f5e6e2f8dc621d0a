"""What all foreign Swin layouts share: key names and the channel order of patch merging."""

from __future__ import annotations

import re

from torch import Tensor

from slab_det.checkpoints.weight import Weights

_RENAMES = (
    (r'^layers\.', 'stages.'),
    (r'^patch_embed\.proj\.', 'patch_embed.projection.'),
    (r'\.attn\.', '.attn.w_msa.'),
    (r'\.mlp\.fc1\.', '.ffn.layers.0.0.'),
    (r'\.mlp\.fc2\.', '.ffn.layers.1.'),
)
_MERGED_CHANNELS = re.compile(
    r'\.downsample\.(reduction\.weight|norm\.(\w+\.)*(weight|bias|running_mean|running_var))$'
)


def is_swin(keys: set[str]) -> bool:
    """Whether the keys are those of a Swin in Microsoft's or timm's layout."""
    # Swin V2 has the same names, but scales the cosine of queries and keys.
    return 'layers.0.blocks.0.attn.qkv.weight' in keys and 'layers.0.blocks.0.attn.logit_scale' not in keys


def is_foreign_swin(keys: set[str]) -> bool:
    """Whether the keys are those of a Swin whose patch merging ends a stage, as in Microsoft's code."""
    # timm puts patch merging at the start of the next stage.
    return is_swin(keys) and (
        'layers.0.downsample.reduction.weight' in keys or not any('.downsample.' in key for key in keys)
    )


def to_unfold_order(merged: Tensor) -> Tensor:
    """Reorders the 4 C channels of a merged 2x2 block, the last dimension.

    Microsoft, SLAB and timm concatenate four slices, at (row, column) (0, 0), (1, 0), (0, 1), (1, 1); mmdet unfolds:
    channel c is followed by its four places, row by row.
    """
    by_place = merged.unflatten(-1, (2, 2, -1))  # (..., column, row, C)
    return by_place.transpose(-1, -3).flatten(-3)


def to_native_swin(weights: Weights) -> Weights:
    """Renames and reorders a Microsoft-style Swin, whatever its norms are made of."""
    native = {}
    for key, weight in weights.items():
        if _MERGED_CHANNELS.search(key):
            weight = weight.changed(to_unfold_order(weight.value), 'channel order of patch merging')
        for pattern, replacement in _RENAMES:
            key = re.sub(pattern, replacement, key)
        native[key] = weight
    return native
