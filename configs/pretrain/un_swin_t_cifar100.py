# Swin-T with Unified Normalization on CIFAR-100, from its ImageNet weights.
_base_ = ['../_base_/cifar.py', 'mmpretrain::_base_/models/swin_transformer/tiny_224.py']

model = dict(
    backbone=dict(_delete_=True, type='mmdet.SLABSwin', out_indices=(3,), drop_path_rate=0.2, norm_cfg=dict(type='UN')),
    head=dict(num_classes=100, loss=dict(_delete_=True, type='CrossEntropyLoss')),
    train_cfg=None,
)
load_from = 'work_dirs/un_swin_t_in1k/epoch_300.pth'
