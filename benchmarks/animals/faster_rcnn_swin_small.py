# Faster R-CNN with a small LayerNorm Swin on photographs of kangaroos and raccoons (see prepare.py), from scratch.
_base_ = ['../bccd/faster_rcnn_swin_small.py']

data_root = 'data/animals/'
metainfo = dict(classes=('kangaroo', 'raccoon'))
train_dataloader = dict(dataset=dict(data_root=data_root, metainfo=metainfo))
val_dataloader = dict(dataset=dict(data_root=data_root, metainfo=metainfo))
test_dataloader = val_dataloader
val_evaluator = dict(ann_file=data_root + 'annotations/instances_val.json')
test_evaluator = val_evaluator

model = dict(roi_head=dict(bbox_head=dict(num_classes=2)))
