# BatchNorm over all tokens for every LayerNorm. No weights were released: the scale and shift of Microsoft's LayerNorms
# are a start for those of the BatchNorms.
custom_hooks = [dict(type='RecalibrateFuseHook')]
row = dict(backbone=dict(norm_cfg=dict(type='TokenBN')))
