"""Runner hooks, registered in mmengine's HOOKS."""
from .checked_load import CheckedLoadHook
from .exclude_padding import ExcludePaddingHook
from .pool_statistics import PoolStatisticsHook
from .progressive_norm import ProgressiveNormHook
from .random_state import RandomStateHook
from .recalibrate_fuse import RecalibrateFuseHook
from .unified_norm import UnifiedNormHook

__all__ = ['CheckedLoadHook', 'ExcludePaddingHook', 'PoolStatisticsHook', 'ProgressiveNormHook', 'RandomStateHook',
           'RecalibrateFuseHook', 'UnifiedNormHook']
