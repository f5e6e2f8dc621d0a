"""timm's Swin layout since timm 0.9 (timm.models.swin_transformer): Microsoft's but for two places.

Patch merging begins a stage: ``layers.{i}.downsample`` (i > 0) is Microsoft's ``layers.{i - 1}.downsample``, in the
same channel order. The head is ``head.fc``. Weights of older timm are in Microsoft's layout.

timm's forward is not everywhere that of Microsoft's and mmdet's detectors, which is ours: timm does not shift windows
where the map is no larger than one (the last stage at 224; it does with ``always_partition=True``), and it pads maps
that windows do not fill after the shift, not before. Where windows fill the map both compute the same.
"""

from __future__ import annotations

import re

from slab_det.checkpoints.swin_layout import is_swin, to_native_swin
from slab_det.checkpoints.weight import CheckpointFormat, Weights


def matches(keys: set[str]) -> bool:
    return (
        is_swin(keys)
        and {'layers.1.downsample.reduction.weight'} <= keys
        and not any(key.startswith('layers.0.downsample.') for key in keys)
    )


def convert(weights: Weights) -> Weights:
    return to_native_swin(
        {
            re.sub(
                r'^layers\.(\d+)\.downsample\.', lambda match: f'layers.{int(match[1]) - 1}.downsample.', key
            ): weight
            for key, weight in weights.items()
        }
    )


FORMAT = CheckpointFormat('timm_swin', matches, convert)
