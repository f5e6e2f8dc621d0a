# Unified Normalization. The authors released no Swin weights: the scale and shift of Microsoft's LayerNorms are a start
# for UN's.
custom_hooks = [dict(type='RecalibrateFuseHook')]
# M and warm-up of the paper.
row = dict(backbone=dict(norm_cfg=dict(type='UN', window_size=4, warmup_iters=4000)))
