"""Checks that a config's data exists and fits its model: nothing is trained or measured on what is not there."""

from slab_det.preflight.check import check_class_order, check_data, check_evaluation, check_num_classes, set_data_root
from slab_det.preflight.classes import classes_of_meta
