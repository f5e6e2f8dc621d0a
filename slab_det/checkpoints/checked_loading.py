"""Checks what mmengine loads without a runner: DetInferencer, init_detector, load_checkpoint."""
from __future__ import annotations

import mmengine.runner.checkpoint
from torch import nn

from .detector import check_detector_checkpoint

_load_checkpoint_to_model = mmengine.runner.checkpoint._load_checkpoint_to_model


def install_checked_loading() -> None:
    """Makes mmengine check a checkpoint before it goes into a detector, print the report, and refuse a wrong one.

    The runner has :class:`slab_det.hooks.CheckedLoadHook` for that. ``mmdet.apis`` binds the function when it is
    imported: that must come after slab_det.
    """
    mmengine.runner.checkpoint._load_checkpoint_to_model = _load_checked


def _load_checked(model: nn.Module, checkpoint: dict, *args, **kwargs) -> dict:
    if hasattr(model, 'backbone'):
        check_detector_checkpoint(model, checkpoint)
    return _load_checkpoint_to_model(model, checkpoint, *args, **kwargs)
