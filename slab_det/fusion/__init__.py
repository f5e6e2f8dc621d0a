"""Exact fusion of offline norms into neighbouring linear layers."""

from slab_det.fusion import fpn, mmdet_swin, pvt, swin  # noqa: F401 (register their rules)
from slab_det.fusion.detector import FusedDetector
from slab_det.fusion.fuse import FusionError, fuse
from slab_det.fusion.report import FusionReport, NormFate
from slab_det.fusion.save import fused_config, save_fused

__all__ = [
    'FusedDetector',
    'FusionError',
    'FusionReport',
    'NormFate',
    'fuse',
    'fused_config',
    'save_fused',
]
