# What a run with PRepBN needs besides norm_cfg: gamma goes to 0, then the norms are folded away.
custom_hooks = [
    # 4/5 of the run: with a shorter decay, users of the released code report NaN from a LayerNorm start. In our runs
    # from scratch RepBN from the first iteration was level with it where images differ, and 0.02 ahead where they are
    # alike (three seeds; docs/results.md).
    dict(type='ProgressiveNormHook', decay='linear', total=0.8, unit='fraction'),
    # In as many passes as it takes: cut short, it cost a detector 0.29 of its mask AP. Of a few hundred
    # images that differ, 50 were enough; the default is 500, as training had them, with the padding of its batches: the
    # statistics of images as inference has them cost detectors that were trained on padded batches 0.01 to 0.05 of AP
    # (BCCD, 40 % padding, two seeds; COCO has 19 % and was not run).
    dict(type='RecalibrateFuseHook'),
]
