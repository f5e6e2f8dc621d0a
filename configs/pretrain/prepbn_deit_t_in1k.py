# DeiT-T-PRepBN, without drop-path, and RepBN alone from the start, as in the released code and in Table A1.
_base_ = ['./deit_t_in1k.py', '../_base_/rows/prepbn_pvt.py']

model = dict(backbone=dict(_base_.row.backbone, drop_path_rate=0.0))
custom_hooks = [dict(type='ProgressiveNormHook', total=0), dict(type='RecalibrateFuseHook')]
