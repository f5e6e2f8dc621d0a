# What a run with UN, MABN or PowerNorm needs besides norm_cfg: averages that start with it, and the end without norms.
# Recalibration changed the AP of none of them in our runs (docs/results.md); with it what is served does not depend on
# the last batches of the training. On images as training had them: see prepbn.py,
# whose runs had no norm of this kind.
custom_hooks = [
    dict(type='UnifiedNormHook'),
    dict(type='RecalibrateFuseHook', pipeline='train'),
]
