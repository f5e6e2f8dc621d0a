"""Builds detectors of full size with random weights, to measure their costs."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from slab_det.checkpoints import build_detector
from slab_det.cli.config import read_config
from slab_det.fusion.folding import fuse
from slab_det.measure.untrained import prepare_untrained


def build_untrained(config: str | Path, backbone: Mapping) -> nn.Module:
    """Builds and fuses the detector of a config with random weights (seed 0), prepared as tools/latency.py prepares it.

    Args:
        config: Path of the config, or a name such as ``mmdet::pvt/retinanet_pvt-t_fpn_1x_coco.py``.
        backbone: Changes of its backbone, for example ``dict(type='SwinTransformer')`` for mmdet's own.

    Returns:
        The detector in eval mode; LayerNorms stay.
    """
    cfg = read_config(str(config))
    cfg.merge_from_dict({'model.backbone': {'init_cfg': None, **backbone}})
    torch.manual_seed(0)
    model = build_detector(cfg)
    prepare_untrained(model)
    return fuse(model, inplace=True)
