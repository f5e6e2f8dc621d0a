# Mask R-CNN with a small LayerNorm Swin on DSB2018 (microscopy, one class: nucleus), from scratch: 500 iterations of 4.
_base_ = ['../../configs/_base_/models/mask_rcnn_swin_small.py', '../loaders.py']

data_root = 'data/dsb2018/'
metainfo = dict(classes=('nucleus',))
scale = (512, 512)  # most images are 256x256 with nuclei of 17 pixels
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='Resize', scale=scale, keep_ratio=True),
    # A quarter of the image is a quarter of the time, and still holds a dozen nuclei.
    dict(type='RandomCrop', crop_size=(256, 256)),
    dict(type='RandomFlip', prob=0.5, direction=['horizontal', 'vertical']),
    dict(type='PackDetInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=scale, keep_ratio=True),
    dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
    dict(type='PackDetInputs', meta_keys=('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor')),
]
train_dataloader = dict(dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(data_root=data_root, metainfo=metainfo, pipeline=test_pipeline))
test_dataloader = val_dataloader
# Up to 375 nuclei in one image: plain pycocotools counts the best 100 detections for AP whatever it is told.
val_evaluator = dict(
    type='CocoMetric',
    ann_file=data_root + 'annotations/instances_val.json',
    metric=['bbox', 'segm'],
    use_mp_eval=True,
    proposal_nums=(100, 300, 400),
)
test_evaluator = val_evaluator

model = dict(
    roi_head=dict(bbox_head=dict(num_classes=1), mask_head=dict(num_classes=1)),
    test_cfg=dict(rpn=dict(nms_pre=1000, max_per_img=500), rcnn=dict(max_per_img=400)),
)
