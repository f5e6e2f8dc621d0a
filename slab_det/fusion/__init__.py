"""Exact fusion of offline norms into neighbouring linear layers."""
from . import fpn, mmdet_swin, pvt, swin  # noqa: F401 (register their rules)
from .detector import FusedDetector, drop_pretrained
from .fuse import FusionError, fuse
from .report import FusionReport, NormFate
from .save import fused_config, save_fused

__all__ = ['FusedDetector', 'FusionError', 'FusionReport', 'NormFate', 'drop_pretrained', 'fuse', 'fused_config',
           'save_fused']
