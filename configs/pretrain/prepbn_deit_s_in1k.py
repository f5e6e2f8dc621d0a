# DeiT-S-PRepBN, without drop-path as in the released code, where gamma falls over 300,000 of 375,300 iterations.
_base_ = ['./deit_s_in1k.py', '../_base_/prepbn.py']

model = dict(backbone=dict(norm_cfg=dict(_delete_=True, type='PRepBN', ln_eps=1e-6), drop_path_rate=0.0))
