# SLAB-CSWin-T, with the blocks of FLatten-CSWin-T. gamma falls over the first 120,000 of 375,300 iterations.
_base_ = ['./cswin_t_in1k.py']

model = dict(
    backbone=dict(
        depths=(2, 4, 18, 1),
        drop_path_rate=0.1,
        norm_cfg=dict(type='PRepBN'),
        attention=('sla', 'sla', 'softmax', 'softmax'),
        stripe_widths=(None, None, 7, None),
    )
)
custom_hooks = [
    dict(type='EMAHook', momentum=1e-4),
    dict(type='ProgressiveNormHook', total=120000 / 375300),
    dict(type='RecalibrateFuseHook'),
]
