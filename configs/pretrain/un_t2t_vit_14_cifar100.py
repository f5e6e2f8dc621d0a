# T2T-ViT-14 with Unified Normalization on CIFAR-100, from its ImageNet weights.
_base_ = ['../_base_/cifar.py', 'mmpretrain::_base_/models/t2t-vit-t-14.py']

model = dict(
    backbone=dict(_delete_=True, type='mmdet.ConvertedModel', model=_base_.model.backbone, norm_cfg=dict(type='UN')),
    head=dict(num_classes=100, loss=dict(_delete_=True, type='CrossEntropyLoss')),
    train_cfg=None,
)
load_from = 'work_dirs/un_t2t_vit_14_in1k/epoch_310.pth'
