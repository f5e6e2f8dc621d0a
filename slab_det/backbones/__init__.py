"""Backbones, registered in mmdet's MODELS."""
from .pvt import SLABPVT
from .swin import SLABSwin

__all__ = ['SLABPVT', 'SLABSwin']
