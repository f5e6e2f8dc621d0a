"""Recalibration: estimates the statistics of norms anew on images."""

from slab_det.recalibration.fixed_point import RecalibrationReport, recalibrate
from slab_det.recalibration.images import PIPELINES, image_folder_dataloader, recalibration_dataloader
from slab_det.recalibration.moments import RecalibrationError
