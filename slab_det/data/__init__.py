"""Datasets of generated shapes and of a folder of pictures, and checks of a config's data before it is used."""

from slab_det.data.check import check_data, check_num_classes, set_data_root
from slab_det.data.folder import ImageFolder
from slab_det.data.preprocessor import CheckedDataPreprocessor
from slab_det.data.synthetic import SyntheticShapes, generate
