# DeiT-T-PRepBN, without drop-path, and RepBN alone from the start, as in the released code and in Table A1.
_base_ = ['./deit_t_in1k.py']

model = dict(backbone=dict(norm_cfg=dict(_delete_=True, type='PRepBN', ln_eps=1e-6), drop_path_rate=0.0))
custom_hooks = [dict(type='ProgressiveNormHook', total=0), dict(type='RecalibrateFuseHook')]
