# Swin-S-PRepBN; no recipe of it was released.
_base_ = ['./swin_s_in1k.py', '../_base_/prepbn.py']

model = dict(backbone=dict(norm_cfg=dict(type='PRepBN')))
