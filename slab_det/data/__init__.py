"""Datasets: the generated shapes of the quick start, and the check that a config's data is there."""

from slab_det.data.check import check_data, set_data_root
from slab_det.data.synthetic import SyntheticShapes, SyntheticShapesMetric, generate

__all__ = ['SyntheticShapes', 'SyntheticShapesMetric', 'check_data', 'generate', 'set_data_root']
