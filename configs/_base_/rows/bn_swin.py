# BatchNorm over all tokens for every LayerNorm. No weights were released: the scale and shift of Microsoft's LayerNorms
# are a start for those of the BatchNorms.
# Recalibrated on images as training had them: see ../prepbn.py.
custom_hooks = [dict(type='RecalibrateFuseHook', pipeline='train')]
row = dict(backbone=dict(norm_cfg=dict(type='TokenBN')))
