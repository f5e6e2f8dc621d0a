# What a run with PRepBN needs besides norm_cfg: gamma goes to 0, then the norms are folded away.
custom_hooks = [
    # 4/5 of the run: with a shorter decay, users of the released code report NaN from a LayerNorm start. In our runs
    # from scratch 0 to 0.8 were within the noise and 1.0 was the worst where images differ (one seed); where they are
    # alike RepBN from the first iteration was 0.02 ahead of 0.8 (three seeds; docs/results.md).
    dict(type='ProgressiveNormHook', decay='linear', total=0.8, unit='fraction'),
    # In as many passes as it takes: cut short, it cost detectors 0.06 and 0.29 of their mask AP. Of a few hundred
    # images that differ, 50 were enough; the default is 500, as training had them, with the padding of its batches: the
    # statistics of images as inference has them cost detectors that were trained on padded batches 0.01 to 0.05 of AP
    # (BCCD, 40 % padding, two seeds; COCO has 19 % and was not run).
    dict(type='RecalibrateFuseHook'),
]
