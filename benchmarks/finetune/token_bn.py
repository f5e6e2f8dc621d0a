# The naive way: every LayerNorm becomes a BatchNorm that starts with its weight and bias.
_base_ = ['./schedule.py']

custom_hooks = [dict(type='RecalibrateFuseHook', num_images=100)]
model = dict(backbone=dict(norm_cfg=dict(type='TokenBN')))
