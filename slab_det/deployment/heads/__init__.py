"""Families of heads whose detectors a CUDA graph and an ONNX file compute whole; each family is one file."""

from torch import nn

from slab_det.deployment.heads.base import Family, Frame, Objects, Unsupported, require
from slab_det.deployment.heads.retinanet import RetinaNet
from slab_det.deployment.heads.two_stage import TwoStage

FAMILIES: tuple[type[Family], ...] = (TwoStage, RetinaNet)

__all__ = ['FAMILIES', 'Objects', 'Family', 'Frame', 'Unsupported', 'find_family', 'require']


def find_family(detector: nn.Module) -> type[Family]:
    """Returns the family whose detectors predict as ``detector`` does.

    Raises:
        Unsupported: If no family does.
    """
    for family in FAMILIES:
        if isinstance(detector, family.base) and type(detector).predict is family.base.predict:
            return family
    bases = ' or '.join(family.base.__name__ for family in FAMILIES)
    raise Unsupported(f'a graph of detections needs a detector that predicts as {bases} does')
