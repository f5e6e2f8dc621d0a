"""Families of mmdet's heads; each family is one file, which holds all that we know of it.

What a CUDA graph or an ONNX file computes, the hidden channels of the heads, the layers that read the maps, and how
absorption runs the heads.
"""

from torch import nn

from slab_det.families.atss import ATSS
from slab_det.families.base import BoxFamily, Family, Frame, Objects, Unsupported, nearest_base, require
from slab_det.families.cascade import Cascade
from slab_det.families.deformable_detr import DeformableTransformer
from slab_det.families.fcos import FCOS
from slab_det.families.mask2former import Mask2Former
from slab_det.families.maskformer import MaskFormer
from slab_det.families.retinanet import RetinaNet
from slab_det.families.rtmdet import RTMDet
from slab_det.families.rtmdet_ins import RTMDetIns
from slab_det.families.two_stage import TwoStage

# An ONNX file holds these, a CUDA graph holds all.
EXPORTED: tuple[type[BoxFamily], ...] = (TwoStage, Cascade, RetinaNet, ATSS, FCOS, RTMDet, RTMDetIns)
FAMILIES: tuple[type[Family], ...] = (*EXPORTED, DeformableTransformer, MaskFormer, Mask2Former)

__all__ = [
    'EXPORTED',
    'FAMILIES',
    'BoxFamily',
    'Family',
    'Frame',
    'Objects',
    'Unsupported',
    'find_absorbed',
    'find_family',
    'require',
]


def find_family(detector: nn.Module, among: tuple[type[Family], ...] = FAMILIES) -> type[Family]:
    """Returns the family whose detectors predict as ``detector`` does.

    Raises:
        Unsupported: If no family does.
    """
    families = [family for family in among if _predicts_as(detector, family.base)]
    if not families:
        bases = ' or '.join(dict.fromkeys(family.base.__name__ for family in among))
        raise Unsupported(f'a graph of detections needs a detector that predicts as {bases} does')
    name = families[0].part
    of_class = {base: family for family in families for base in family.heads}
    head = getattr(detector, name, None)
    # Heads of one family may derive from heads of another.
    base = nearest_base(head, of_class)
    if base is None:
        known = ' or '.join(base.__name__ for base in of_class)
        raise Unsupported(f'a graph needs {known} as {name}, not {type(head).__name__}')
    return of_class[base]


def find_absorbed(detector: nn.Module) -> type[Family] | None:
    """Returns the family whose heads absorption runs and prunes, or None."""
    return next((family for family in FAMILIES if family.absorbs(detector)), None)


def _predicts_as(detector: nn.Module, base: type[nn.Module]) -> bool:
    return isinstance(detector, base) and type(detector).predict is base.predict
