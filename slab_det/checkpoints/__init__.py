"""Checkpoints in our own and foreign layouts, loaded whole or not at all."""

from slab_det.checkpoints.load import check_detector_checkpoint, load_pretrained, register_load_check
from slab_det.checkpoints.norms import is_fused
from slab_det.checkpoints.report import LoadReport

__all__ = ['LoadReport', 'check_detector_checkpoint', 'is_fused', 'load_pretrained', 'register_load_check']
