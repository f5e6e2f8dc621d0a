# A Mask R-CNN that trains from scratch in minutes on two CPU cores.
_base_ = ['mmdet::_base_/models/mask-rcnn_r50_fpn.py']

model = dict(
    data_preprocessor=dict(type='CheckedDataPreprocessor'),
    backbone=dict(
        _delete_=True,
        type='SLABSwin',
        embed_dims=32,
        depths=(2, 2, 2, 2),
        num_heads=(1, 2, 4, 8),
        drop_path_rate=0.0,  # runs from scratch are short
        norm_cfg=dict(type='LN'),
    ),
    neck=dict(in_channels=[32, 64, 128, 256], out_channels=64),
    rpn_head=dict(in_channels=64, feat_channels=64, anchor_generator=dict(scales=[4])),  # objects of 16 to 128 pixels
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=64),
        bbox_head=dict(in_channels=64, fc_out_channels=256),
        mask_roi_extractor=dict(out_channels=64),
        mask_head=dict(num_convs=2, in_channels=64, conv_out_channels=64),
    ),
    train_cfg=dict(rpn_proposal=dict(nms_pre=1000, max_per_img=300), rcnn=dict(sampler=dict(num=128))),
    test_cfg=dict(rpn=dict(nms_pre=300, max_per_img=300)),
)
