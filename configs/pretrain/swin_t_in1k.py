# Swin-T with LayerNorm.
_base_ = ['../_base_/models/classifier.py', '../_base_/in1k.py']

model = dict(
    backbone=dict(
        type='mmdet.SLABSwin',
        embed_dims=96,
        depths=(2, 2, 6, 2),
        num_heads=(3, 6, 12, 24),
        window_size=7,
        out_indices=(3,),
        drop_path_rate=0.2,
        norm_cfg=dict(type='LN'),
    )
)
