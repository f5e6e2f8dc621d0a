# The detector of mask_rcnn_swin.py on images of 320 pixels, with widths that give backbone, neck, RPN, box head and
# mask head (of 45 objects) 37, 23, 22, 9 and 9 % of the multiply-adds, about those of a Mask R-CNN at 800x1333.
_base_ = ['mask_rcnn_swin.py']

train_pipeline, test_pipeline = _base_.train_pipeline, _base_.test_pipeline
train_pipeline[2].scale = test_pipeline[1].scale = (320, 320)
train_dataloader = dict(batch_size=8, dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader

model = dict(
    neck=dict(out_channels=128),
    rpn_head=dict(in_channels=128, feat_channels=128),
    roi_head=dict(
        bbox_roi_extractor=dict(out_channels=128),
        bbox_head=dict(in_channels=128),
        mask_roi_extractor=dict(out_channels=128),
        mask_head=dict(in_channels=128, conv_out_channels=32),
    ),
)
optim_wrapper = dict(optimizer=dict(lr=4e-4))
