# What a run with UN, MABN or PowerNorm needs besides norm_cfg: averages that start with it, and the end without norms.
custom_hooks = [
    dict(type='UnifiedNormHook'),
    dict(type='RecalibrateFuseHook'),
]
