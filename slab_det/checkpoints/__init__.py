"""Builds detectors, and loads checkpoints in native and foreign layouts, completely or not at all."""

from slab_det.checkpoints.build import build_detector
from slab_det.checkpoints.load import check_detector_checkpoint, check_state_dict, load_pretrained
from slab_det.checkpoints.load_report import LoadReport
from slab_det.checkpoints.norms import is_fused
