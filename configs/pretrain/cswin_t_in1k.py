# CSWin-T with LayerNorm. Its weights are averaged over about 12,500 iterations, and gradients are not clipped.
_base_ = ['../_base_/models/classifier.py', '../_base_/in1k.py']

model = dict(
    backbone=dict(
        type='mmdet.SLABCSwin',
        depths=(1, 2, 21, 1),
        out_indices=(3,),
        drop_path_rate=0.2,
        norm_cfg=dict(type='LN'),
    ),
    head=dict(in_channels=512),
)
optim_wrapper = dict(clip_grad=None)
custom_hooks = [dict(type='EMAHook', momentum=8e-5)]
