"""Datasets (generated shapes, a folder of images), and checks that a config's data exists and fits."""

from slab_det.data.check import check_class_order, check_data, check_num_classes, set_data_root
from slab_det.data.classes import classes_of_meta
from slab_det.data.folder import ImageFolder
from slab_det.data.preprocessor import CheckedDataPreprocessor
from slab_det.data.synthetic import SyntheticShapes, generate
