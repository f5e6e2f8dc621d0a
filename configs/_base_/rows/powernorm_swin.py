# PowerNorm with the defaults of its class, from the scale and shift of Microsoft's LayerNorms.
_base_ = ['../moving_average_norm.py']

row = dict(backbone=dict(norm_cfg=dict(type='PowerNorm')))
