# Swin-PRepBN.
_base_ = ['../prepbn.py']

row = dict(backbone=dict(norm_cfg=dict(_delete_=True, type='PRepBN')))
