# SLAB-DeiT-T, without drop-path and with the average of all tokens in the place of a class token, as in the released
# code. gamma falls over the first 60,000 of 375,300 iterations.
_base_ = ['./deit_t_in1k.py', '../_base_/rows/prepbn_pvt.py']

model = dict(
    backbone=dict(_base_.row.backbone, drop_path_rate=0.0, out_type='featmap', attention='sla'),
    neck=dict(_base_.classifier.neck, _delete_=True),
)
custom_hooks = [dict(type='ProgressiveNormHook', total=60000 / 375300), dict(type='RecalibrateFuseHook')]
