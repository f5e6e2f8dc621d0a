"""Datasets: generated shapes, a folder of pictures; and checks: data is there and fits, an image is 0 to 255."""

import io
from contextlib import redirect_stdout

# It prints that it cannot import the datasets of another product.
with redirect_stdout(io.StringIO()):
    import mmdet.datasets  # noqa: F401

from slab_det.data.check import check_data, check_num_classes, set_data_root
from slab_det.data.folder import ImageFolder
from slab_det.data.preprocessor import CheckedDataPreprocessor
from slab_det.data.synthetic import SyntheticShapes, generate

__all__ = [
    'CheckedDataPreprocessor',
    'ImageFolder',
    'SyntheticShapes',
    'check_data',
    'check_num_classes',
    'generate',
    'set_data_root',
]
