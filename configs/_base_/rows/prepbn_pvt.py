# PVT-PRepBN and DeiT-PRepBN. Both have LayerNorms with an eps of their own, and so has the LayerNorm in each PRepBN.
_base_ = ['../prepbn.py']

row = dict(backbone=dict(norm_cfg=dict(_delete_=True, type='PRepBN', ln_eps=1e-6)))
