# SLAB-CSWin-T, with the blocks of FLatten-CSWin-T. gamma falls over the first 120,000 of 375,300 iterations.
_base_ = ['./cswin_t_in1k.py', '../_base_/rows/slab_cswin.py']

model = dict(backbone=dict(_base_.row.backbone, depths=(2, 4, 18, 1)))
custom_hooks = [
    dict(type='EMAHook', momentum=1e-4),
    dict(type='ProgressiveNormHook', total=120000 / 375300),
    dict(type='RecalibrateFuseHook'),
]
