# Swin-T with Unified Normalization on CIFAR-100, from its ImageNet weights.
_base_ = ['../_base_/cifar.py', 'mmpretrain::_base_/models/swin_transformer/tiny_224.py']

model = dict(
    _base_.transfer,
    backbone=dict(_delete_=True, type='mmdet.SLABSwin', out_indices=(3,), drop_path_rate=0.2, norm_cfg=dict(type='UN')),
)
load_from = 'work_dirs/un_swin_t_in1k/epoch_300.pth'
