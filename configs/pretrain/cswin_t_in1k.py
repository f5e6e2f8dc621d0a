# CSWin-T with LayerNorm. Its weights are averaged over about 12,500 iterations, and gradients are not clipped.
_base_ = ['../_base_/models/mask_rcnn_cswin_t.py', '../_base_/in1k.py']

model = dict(
    _base_.classifier,
    _delete_=True,
    backbone=dict(
        _base_.model.backbone,
        type='mmdet.SLABCSwin',
        out_indices=(3,),
        init_cfg=None,
    ),
    head=dict(_base_.classifier.head, in_channels=512),
)
optim_wrapper = dict(clip_grad=None)
custom_hooks = [dict(type='EMAHook', momentum=8e-5)]
