"""Checks what mmengine and mmdet load without asking us: DetInferencer, init_detector, stock backbones."""
from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import mmengine.runner.checkpoint
from mmdet.models.backbones import PyramidVisionTransformer, SwinTransformer
from mmengine.model import BaseModule
from torch import nn

from slab_det.layers.offline_norm import named_offline_norms

from .detector import check_detector_checkpoint
from .load import load_pretrained

_load_checkpoint_to_model = mmengine.runner.checkpoint._load_checkpoint_to_model


def install_checked_loading() -> None:
    """Makes mmengine check a checkpoint before it goes into a detector, print the report, and refuse a wrong one.

    The runner has :class:`slab_det.hooks.CheckedLoadHook` for that. ``mmdet.apis`` binds the function when it is
    imported: that must come after slab_det. mmdet's Swin and PVT load pretrained weights by key and skip what does not
    match; with one of our norms, whose keys are not LayerNorm's, they load as our backbones do.
    """
    mmengine.runner.checkpoint._load_checkpoint_to_model = _load_checked
    for backbone in (SwinTransformer, PyramidVisionTransformer):
        if not hasattr(backbone.init_weights, '__wrapped__'):
            backbone.init_weights = _init_checked(backbone.init_weights)


def _load_checked(model: nn.Module, checkpoint: dict, *args, **kwargs) -> dict:
    if hasattr(model, 'backbone'):
        check_detector_checkpoint(model, checkpoint)
    return _load_checkpoint_to_model(model, checkpoint, *args, **kwargs)


def _init_checked(init_weights: Callable[[BaseModule], None]) -> Callable[[BaseModule], None]:
    """``init_weights`` of a stock backbone, which leaves pretrained weights for our norms to our loader."""
    @wraps(init_weights)
    def init_weights_checked(self: BaseModule) -> None:
        init_cfg = self.init_cfg
        if not init_cfg or init_cfg.get('type') != 'Pretrained' or not any(named_offline_norms(self)):
            init_weights(self)
            return
        self.init_cfg = None
        try:
            init_weights(self)
        finally:
            self.init_cfg = init_cfg
        load_pretrained(self, init_cfg['checkpoint'])
    return init_weights_checked
