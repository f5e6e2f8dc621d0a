# PVT-T with LayerNorm, pooled over all tokens as in SLAB's code, which has no class token; its schedule too.
_base_ = ['../_base_/models/classifier.py', '../_base_/in1k.py']

model = dict(
    backbone=dict(
        type='mmdet.SLABPVT',
        num_layers=(2, 2, 2, 2),
        out_indices=(3,),
        drop_path_rate=0.1,
        norm_cfg=dict(type='LN', eps=1e-6),
    ),
    head=dict(in_channels=512),
)
optim_wrapper = dict(clip_grad=None)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.002, end=5, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', begin=5, eta_min=2e-5),
]
