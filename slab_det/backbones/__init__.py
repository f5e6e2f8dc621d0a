"""Backbones, registered in mmdet's MODELS."""

from slab_det.backbones.cswin import SLABCSwin
from slab_det.backbones.pvt import SLABPVT
from slab_det.backbones.swin import SLABSwin
from slab_det.backbones.vit import SLABViT
