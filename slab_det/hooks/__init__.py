"""Runner hooks, registered in mmengine's HOOKS."""
from .progressive_norm import ProgressiveNormHook
from .recalibrate_fuse import RecalibrateFuseHook

__all__ = ['ProgressiveNormHook', 'RecalibrateFuseHook']
