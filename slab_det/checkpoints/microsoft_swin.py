"""Microsoft's Swin Transformer layout (github.com/microsoft/Swin-Transformer), classification and detection."""

from __future__ import annotations

from slab_det.checkpoints.swin_layout import is_foreign_swin, to_native_swin
from slab_det.checkpoints.weight import CheckpointFormat


def matches(keys: set[str]) -> bool:
    return is_foreign_swin(keys) and 'layers.0.blocks.0.norm1.weight' in keys


FORMAT = CheckpointFormat('microsoft_swin', matches, to_native_swin)
