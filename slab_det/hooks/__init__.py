"""Runner hooks, registered in mmengine's HOOKS."""
from .checked_load import CheckedLoadHook
from .progressive_norm import ProgressiveNormHook
from .recalibrate_fuse import RecalibrateFuseHook
from .unified_norm import UnifiedNormHook

__all__ = ['CheckedLoadHook', 'ProgressiveNormHook', 'RecalibrateFuseHook', 'UnifiedNormHook']
