# T2T-ViT-14 with Unified Normalization on CIFAR-100, from its ImageNet weights.
_base_ = ['../_base_/cifar.py', 'mmpretrain::_base_/models/t2t-vit-t-14.py']

model = dict(
    _base_.transfer,
    backbone=dict(_delete_=True, type='mmdet.ConvertedModel', model=_base_.model.backbone, norm_cfg=dict(type='UN')),
)
load_from = 'work_dirs/un_t2t_vit_14_in1k/epoch_310.pth'
