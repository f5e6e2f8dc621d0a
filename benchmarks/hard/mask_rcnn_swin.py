# Mask R-CNN with a LayerNorm Swin on the data of benchmarks/hard/make_data.py; train.py gives width, classes and seed.
_base_ = ['../../configs/_base_/models/mask_rcnn_swin_small.py', '../loaders.py']

data_root = 'data/hard/'
resize = dict(type='Resize', scale=(224, 224), keep_ratio=True)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    resize,
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    resize,
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]
# In this process: the studies train on one core.
loader = dict(num_workers=0, persistent_workers=False)
train_dataloader = dict(batch_size=16, dataset=dict(data_root=data_root, pipeline=train_pipeline), **loader)
val_dataloader = dict(dataset=dict(data_root=data_root, pipeline=test_pipeline), **loader)
test_dataloader = val_dataloader
val_evaluator = dict(type='CocoMetric', ann_file=data_root + 'annotations/instances_val.json', metric=['bbox', 'segm'])
test_evaluator = val_evaluator

model = dict(
    backbone=dict(depths=(2, 2, 4, 2), num_heads=(3, 6, 12, 24)),
    roi_head=dict(bbox_head=dict(reg_class_agnostic=True)),
    train_cfg=dict(rcnn=dict(sampler=dict(num=64))),  # of five objects
)
custom_imports = dict(imports=['slab_det', 'benchmarks.hard.bfloat16'], allow_failed_imports=False)
optim_wrapper = dict(
    type='PartsInBFloat16',
    parts=['backbone', 'neck', 'rpn_head', 'roi_head.bbox_head', 'roi_head.mask_head'],
    optimizer=dict(lr=8e-4),
)
