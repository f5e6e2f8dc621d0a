# Swin-T with LayerNorm.
_base_ = ['../_base_/models/mask_rcnn_swin_t.py', '../_base_/in1k.py']

model = dict(
    _base_.classifier,
    _delete_=True,
    backbone=dict(
        _base_.model.backbone,
        type='mmdet.SLABSwin',
        out_indices=(3,),
        drop_path_rate=0.2,
        init_cfg=None,
    ),
)
