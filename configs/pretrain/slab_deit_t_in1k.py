# SLAB-DeiT-T, without drop-path and with the average of all tokens in the place of a class token, as in the released
# code. gamma falls over the first 60,000 of 375,300 iterations.
_base_ = ['./deit_t_in1k.py']

model = dict(
    backbone=dict(
        norm_cfg=dict(_delete_=True, type='PRepBN', ln_eps=1e-6),
        attention='sla',
        drop_path_rate=0.0,
        out_type='featmap',
    ),
    neck=dict(_delete_=True, type='GlobalAveragePooling'),
)
custom_hooks = [dict(type='ProgressiveNormHook', total=60000 / 375300), dict(type='RecalibrateFuseHook')]
