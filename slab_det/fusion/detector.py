"""FusedDetector: rebuilds the structure of a fused detector from the config of the original."""

from __future__ import annotations

import copy

from mmdet.registry import MODELS
from torch import nn

from slab_det.fusion.fuse import fuse
from slab_det.norms import set_gamma
from slab_det.runtime.config import drop_pretrained


@MODELS.register_module()
def FusedDetector(model: dict) -> nn.Module:  # noqa: N802 (it stands in configs where a class would)
    """Builds ``model`` and removes its norms as :func:`slab_det.fuse` does; the weights come from a checkpoint.

    Args:
        model: The config of the unfused detector. Its pretrained weights are not loaded.

    Returns:
        The plain detector, key prefixes unchanged.
    """
    model = copy.deepcopy(model)
    drop_pretrained(model)
    detector = MODELS.build(model)
    set_gamma(detector, 0.0)
    detector.eval()  # mmdet's backbones return None from it
    return fuse(detector, inplace=True)
