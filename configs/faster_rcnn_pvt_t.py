# PVT-T with LayerNorm. Single scale, 1333x800, as in the released code for every PVT row.
_base_ = [
    './_base_/models/faster_rcnn_pvt_t.py',
    'mmdet::_base_/datasets/coco_detection.py',
    './_base_/schedules/adamw_1x_pvt.py',
    './_base_/runtime.py',
]
