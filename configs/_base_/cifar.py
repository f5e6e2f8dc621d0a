# CIFAR-100 at data/cifar100 (or --data-root) by the transfer learning of UN's released code: images at 224, 60 epochs
# at batch 128, SGD, the backbone at 1/100 of the rate of the head, which starts anew. It needs mmpretrain.
_base_ = ['./runtime.py', 'mmpretrain::_base_/datasets/cifar100_bs16.py']

default_scope = 'mmpretrain'
visualizer = dict(_delete_=True, type='UniversalVisualizer', vis_backends=[dict(type='LocalVisBackend')])
custom_hooks = [dict(type='RecalibrateFuseHook')]
default_hooks = dict(checked_load=dict(reinitialize=['head']))
data_preprocessor = dict(mean=[125.307, 122.961, 113.8575], std=[51.5865, 50.847, 51.255])
train_pipeline = [
    dict(type='Resize', scale=224),
    dict(type='RandomCrop', crop_size=224, padding=28),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='PackInputs'),
]
test_pipeline = [dict(type='Resize', scale=224), dict(type='PackInputs')]
train_dataloader = dict(batch_size=128, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(batch_size=100, dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
train_cfg = dict(by_epoch=True, max_epochs=60)
val_cfg = dict()
test_cfg = dict()
optim_wrapper = dict(
    optimizer=dict(type='SGD', lr=0.05, momentum=0.9, weight_decay=5e-4),
    paramwise_cfg=dict(custom_keys={'backbone': dict(lr_mult=0.01)}),
)
param_scheduler = [dict(type='CosineAnnealingLR', eta_min_ratio=0.004)]
auto_scale_lr = dict(base_batch_size=128)
