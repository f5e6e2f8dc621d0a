# SLAB-Swin-T. gamma falls over the first 60,000 of 375,300 iterations.
_base_ = ['./swin_t_in1k.py']

model = dict(
    backbone=dict(
        norm_cfg=dict(type='PRepBN'),
        attention=('sla', 'sla', 'softmax', 'softmax'),
        window_sizes=(56, 28, 7, 7),
    )
)
custom_hooks = [dict(type='ProgressiveNormHook', total=60000 / 375300), dict(type='RecalibrateFuseHook')]
