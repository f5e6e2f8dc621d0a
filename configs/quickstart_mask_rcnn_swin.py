# The quick start's LayerNorm twin: generated images, no download, minutes on two CPU cores.
_base_ = [
    './_base_/models/mask_rcnn_swin_small.py',
    './_base_/schedules/adamw_scratch.py',
]

train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomFlip', prob=0.5, direction=['horizontal', 'vertical']),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(192, 160), keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'instances')),
]
train_dataloader = dict(
    batch_size=4,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(type='SyntheticShapes', split='train', filter_cfg=dict(filter_empty_gt=True), pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='SyntheticShapes', split='val', test_mode=True, pipeline=test_pipeline),
)
test_dataloader = val_dataloader
# By the instances in the samples: the annotation file lies in a cache folder that differs between machines.
val_evaluator = dict(type='CocoMetric', metric=['bbox', 'segm'])
test_evaluator = val_evaluator

model = dict(
    roi_head=dict(bbox_head=dict(num_classes=4), mask_head=dict(num_classes=4)),
    # Two to four objects are in an image.
    train_cfg=dict(rpn_proposal=dict(nms_pre=300, max_per_img=100), rcnn=dict(sampler=dict(num=64))),
    test_cfg=dict(rpn=dict(max_per_img=100)),
)

# 300 iterations at twice the rate of the schedule, which suits its 500.
max_iters = 300
train_cfg = dict(max_iters=max_iters, val_interval=100)
optim_wrapper = dict(optimizer=dict(lr=1e-3))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=60),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=60, end=max_iters, T_max=max_iters - 60, eta_min=1e-5),
]
default_hooks = dict(checkpoint=dict(interval=max_iters))
del max_iters
