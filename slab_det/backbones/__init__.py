"""Backbones, registered in mmdet's MODELS."""
from .swin import SLABSwin

__all__ = ['SLABSwin']
