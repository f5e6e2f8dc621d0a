"""Checkpoints in our own and foreign layouts, loaded whole or not at all."""
from .detector import check_detector_checkpoint
from .load import load_pretrained
from .report import LoadReport

__all__ = ['LoadReport', 'check_detector_checkpoint', 'load_pretrained']
