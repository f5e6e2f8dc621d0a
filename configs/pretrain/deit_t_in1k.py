# DeiT-T with LayerNorm, by the recipe of SLAB's released code. DeiT's own has 5 epochs of warm-up, repeated
# augmentation and no clipping.
_base_ = ['../_base_/models/classifier.py', '../_base_/in1k.py']

model = dict(
    backbone=dict(
        type='mmdet.SLABViT',
        drop_path_rate=0.1,
        out_type='cls_token',
        norm_cfg=dict(type='LN', eps=1e-6),
    ),
    neck=None,
    head=dict(in_channels=192),
)
optim_wrapper = dict(
    paramwise_cfg=dict(custom_keys={'cls_token': dict(decay_mult=0.0), 'pos_embed': dict(decay_mult=0.0)})
)
