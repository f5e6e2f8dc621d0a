"""Recalibration: the statistics of norms are found again on images."""

from slab_det.recalibration.collect import RecalibrationError, collect_moments
from slab_det.recalibration.drift import Drift, copy_statistics, statistics_drift
from slab_det.recalibration.fixed_point import RecalibrationReport, recalibrate
from slab_det.recalibration.images import PIPELINES, configured_pipeline, recalibration_dataloader
from slab_det.recalibration.moments import Moments

__all__ = [
    'PIPELINES',
    'Drift',
    'Moments',
    'RecalibrationError',
    'RecalibrationReport',
    'collect_moments',
    'configured_pipeline',
    'copy_statistics',
    'recalibrate',
    'recalibration_dataloader',
    'statistics_drift',
]
