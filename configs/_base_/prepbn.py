# What a run with PRepBN needs besides norm_cfg: gamma goes to 0, then the norms are folded away.
custom_hooks = [
    # 4/5 of the run: with a shorter decay, users of the released code report NaN from a LayerNorm start.
    dict(type='ProgressiveNormHook', decay='linear', total=0.8, unit='fraction'),
    dict(type='RecalibrateFuseHook'),
]
