# Mask R-CNN with FPN on Swin-T. The backbone's weights are ImageNet-1K, at the place Microsoft keeps them.
_base_ = ['mmdet::_base_/models/mask-rcnn_r50_fpn.py']

model = dict(
    data_preprocessor=dict(type='CheckedDataPreprocessor'),
    backbone=dict(
        _delete_=True,
        type='SLABSwin',
        embed_dims=96,
        depths=(2, 2, 6, 2),
        num_heads=(3, 6, 12, 24),
        window_size=7,
        drop_path_rate=0.1,  # the released code of SLAB: 0.1 for T, 0.2 for S
        norm_cfg=dict(type='LN'),
        init_cfg=dict(
            type='Pretrained',
            checkpoint='https://github.com/SwinTransformer/storage/releases/download/v1.0.0/'
            'swin_tiny_patch4_window7_224.pth',
        ),
    ),
    neck=dict(in_channels=[96, 192, 384, 768]),
)
