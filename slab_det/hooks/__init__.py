"""Runner hooks, registered in mmengine's HOOKS."""
from .checked_load import CheckedLoadHook
from .progressive_norm import ProgressiveNormHook
from .recalibrate_fuse import RecalibrateFuseHook

__all__ = ['CheckedLoadHook', 'ProgressiveNormHook', 'RecalibrateFuseHook']
