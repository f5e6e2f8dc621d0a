# The detector's backbone as a classifier of single cells: 64x64 pixels around each, at the detector's scale.
# benchmarks/norms/run.py cuts them out. It needs mmpretrain: pip install "slab_det[pretrain]".
_base_ = ['./faster_rcnn_swin_small.py']

default_scope = 'mmpretrain'
model = dict(
    _delete_=True,
    type='ImageClassifier',
    backbone=dict(_base_.model.backbone, type='mmdet.SLABSwin', out_indices=(3,)),
    neck=dict(type='GlobalAveragePooling'),
    head=dict(type='LinearClsHead', num_classes=3, in_channels=256, loss=dict(type='CrossEntropyLoss')),
)
data_preprocessor = dict(num_classes=3, mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True)
train_dataloader = dict(
    _delete_=True,
    batch_size=32,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type='CustomDataset',
        data_root='data/bccd_cells',
        data_prefix='train',
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='RandomFlip', prob=0.5, direction='horizontal'),
            dict(type='RandomFlip', prob=0.5, direction='vertical'),
            dict(type='PackInputs'),
        ],
    ),
)
val_dataloader = dict(
    train_dataloader,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        train_dataloader['dataset'],
        data_prefix='val',
        pipeline=[dict(type='LoadImageFromFile'), dict(type='PackInputs')],
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(_delete_=True, type='Accuracy')
test_evaluator = val_evaluator
visualizer = dict(_delete_=True, type='UniversalVisualizer', vis_backends=[dict(type='LocalVisBackend')])
