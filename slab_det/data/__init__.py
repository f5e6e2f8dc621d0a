"""Datasets: generated shapes, and a folder of images."""

from slab_det.data.folder import ImageFolder
from slab_det.data.preprocessor import CheckedDataPreprocessor
from slab_det.data.synthetic import SyntheticShapes, generate
