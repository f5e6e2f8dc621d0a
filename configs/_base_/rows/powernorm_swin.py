# PowerNorm with the defaults of its class, from the scale and shift of Microsoft's LayerNorms.
custom_hooks = [dict(type='RecalibrateFuseHook')]
row = dict(backbone=dict(norm_cfg=dict(type='PowerNorm')))
