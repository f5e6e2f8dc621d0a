"""Runner hooks, registered in mmengine's HOOKS.

Hooks with the same event run in the order of their priorities, those of mmengine among them:

| priority | hook | because |
|---|---|---|
| 10 VERY_HIGH | CheckedLoadHook | it converts what EMAHook loads too |
| 50 NORMAL | mmengine's EMAHook; NormStateHook | |
| 55 | ProgressiveNormHook | after EMAHook, whose average of gamma means nothing |
| 60 BELOW_NORMAL | mmengine's LoggerHook | it logs gamma |
| 70 LOW | ExactResumeHook | what other hooks draw comes first; mmengine's ParamSchedulerHook has the same |
| 85 | RecalibrateFuseHook | it reads and rewrites the last checkpoint |
| 90 VERY_LOW | mmengine's CheckpointHook | it publishes what RecalibrateFuseHook wrote |
"""

from slab_det.hooks.checked_load import CheckedLoadHook
from slab_det.hooks.exact_resume import ExactResumeHook
from slab_det.hooks.norm_state import NormStateHook
from slab_det.hooks.progressive_norm import ProgressiveNormHook
from slab_det.hooks.recalibrate_fuse import RecalibrateFuseHook

__all__ = [
    'CheckedLoadHook',
    'ExactResumeHook',
    'NormStateHook',
    'ProgressiveNormHook',
    'RecalibrateFuseHook',
]
