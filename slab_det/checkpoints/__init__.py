"""Checkpoints in our own and foreign layouts, loaded whole or not at all."""
from . import timm_weights  # noqa: F401, I001 (registers timm:// with mmengine)
from .detector import check_detector_checkpoint
from .load import load_pretrained
from .report import LoadReport

__all__ = ['LoadReport', 'check_detector_checkpoint', 'load_pretrained']
