# Mask R-CNN with FPN on PVT-T. The backbone's weights are ImageNet-1K, at the place its authors keep them.
_base_ = ['mmdet::_base_/models/mask-rcnn_r50_fpn.py']

model = dict(
    data_preprocessor=dict(type='CheckedDataPreprocessor'),
    backbone=dict(
        _delete_=True,
        type='SLABPVT',
        num_layers=(2, 2, 2, 2),
        norm_cfg=dict(type='LN', eps=1e-6),
        init_cfg=dict(type='Pretrained', checkpoint='https://github.com/whai362/PVT/releases/download/v2/pvt_tiny.pth'),
    ),
    neck=dict(in_channels=[64, 128, 320, 512]),
)
