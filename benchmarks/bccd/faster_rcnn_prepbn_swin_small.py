# The same run with PRepBN in every norm.
_base_ = ['./faster_rcnn_swin_small.py']

custom_hooks = [
    dict(type='ProgressiveNormHook', decay='linear', total=0.8, unit='fraction'),
    dict(type='RecalibrateFuseHook', num_images=100, pipeline='test'),
]
model = dict(backbone=dict(norm_cfg=dict(type='PRepBN')))
