# What a run with PRepBN needs besides norm_cfg: gamma goes to 0, then the norms are folded away.
custom_hooks = [
    # 4/5 of the run: with a shorter decay, users of the released code report NaN from a LayerNorm start. From scratch
    # RepBN from the first iteration was no worse (docs/norms.md).
    dict(type='ProgressiveNormHook', decay='linear', total=0.8, unit='fraction'),
    # In as many passes as it takes, on 500 images as training had them, with the padding of its batches: cut short, or
    # on images as inference has them, it cost AP (docs/norms.md).
    dict(type='RecalibrateFuseHook'),
]
