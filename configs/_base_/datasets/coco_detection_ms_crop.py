# COCO with boxes at data/coco; tools take another place with --data-root.
_base_ = ['mmdet::_base_/datasets/coco_detection.py', './ms_crop.py']

train_dataloader = dict(
    dataset=dict(
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations', with_bbox=True),
            dict(type='RandomFlip', prob=0.5),
            {{_base_.ms_crop}},
            dict(type='PackDetInputs'),
        ]
    )
)
