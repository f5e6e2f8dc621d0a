"""Runner hooks, registered in mmengine's HOOKS, and a constructor of optimizers.

Hooks run in the order of their priorities, together with mmengine's:

| priority | hook | because |
|---|---|---|
| 10 VERY_HIGH | CheckedLoadHook | it converts the weights that EMAHook loads next |
| 40 ABOVE_NORMAL | FiniteLossHook | nothing may average or save weights that a loss of NaN spoiled |
| 50 NORMAL | mmengine's EMAHook; NormStateHook | |
| 55 | ProgressiveNormHook | after EMAHook, which averages gamma too |
| 60 BELOW_NORMAL | mmengine's LoggerHook | it logs gamma |
| 70 LOW | ExactResumeHook | other hooks draw random numbers before it saves the generators |
| 85 | RecalibrateFuseHook | it reads and rewrites the last checkpoint |
| 90 VERY_LOW | mmengine's CheckpointHook | it publishes the checkpoint that RecalibrateFuseHook rewrote |
"""

from slab_det.hooks.checked_load import CheckedLoadHook
from slab_det.hooks.exact_resume import ExactResumeHook
from slab_det.hooks.finite_loss import FiniteLossHook
from slab_det.hooks.layer_decay import LayerDecayConstructor
from slab_det.hooks.norm_state import NormStateHook
from slab_det.hooks.progressive_norm import ProgressiveNormHook
from slab_det.hooks.recalibrate_fuse import RecalibrateFuseHook
