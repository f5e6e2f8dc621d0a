# COCO with boxes and masks at data/coco; tools take another place with --data-root. The papers' training sizes: 480 to
# 800 on the short side, and the random crop of DETR in half of the images.
_base_ = ['mmdet::_base_/datasets/coco_instance.py']

multi_scale = dict(type='RandomChoiceResize', scales=[(side, 1333) for side in range(480, 801, 32)], keep_ratio=True)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='RandomFlip', prob=0.5),
    dict(
        type='RandomChoice',
        transforms=[
            [multi_scale],
            [
                dict(type='RandomChoiceResize', scales=[(400, 1333), (500, 1333), (600, 1333)], keep_ratio=True),
                dict(type='RandomCrop', crop_type='absolute_range', crop_size=(384, 600), allow_negative_crop=True),
                multi_scale,
            ],
        ],
    ),
    dict(type='PackDetInputs'),
]
del multi_scale
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
