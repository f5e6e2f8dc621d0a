# Mask R-CNN with FPN on CSWin-T. The backbone's weights are ImageNet-1K, at the place Microsoft keeps them.
_base_ = ['mmdet::_base_/models/mask-rcnn_r50_fpn.py']

model = dict(
    data_preprocessor=dict(type='CheckedDataPreprocessor'),
    backbone=dict(
        _delete_=True,
        type='SLABCSwin',
        depths=(1, 2, 21, 1),
        drop_path_rate=0.2,  # Microsoft's on ImageNet; no code for detection was released
        norm_cfg=dict(type='LN'),
        init_cfg=dict(
            type='Pretrained',
            checkpoint='https://github.com/microsoft/CSWin-Transformer/releases/download/v0.1.0/cswin_tiny_224.pth',
        ),
    ),
    neck=dict(in_channels=[64, 128, 256, 512]),
)
