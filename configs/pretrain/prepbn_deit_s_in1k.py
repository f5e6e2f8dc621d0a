# DeiT-S-PRepBN, without drop-path as in the released code, where gamma falls over 300,000 of 375,300 iterations.
_base_ = ['./deit_s_in1k.py', '../_base_/rows/prepbn_pvt.py']

model = dict(backbone=dict(_base_.row.backbone, drop_path_rate=0.0))
