# SLAB-PVT-S.
_base_ = ['./pvt_s_in1k.py', '../_base_/prepbn.py']

model = dict(
    backbone=dict(
        norm_cfg=dict(_delete_=True, type='PRepBN', ln_eps=1e-6),
        attention='sla',
        la_sr_ratios=(1, 1, 1, 1),
    )
)
