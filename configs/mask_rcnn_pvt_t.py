# PVT-T with LayerNorm. Single scale, 1333x800, as in the released code for every PVT row.
_base_ = [
    './_base_/models/mask_rcnn_pvt_t.py',
    'mmdet::_base_/datasets/coco_instance.py',
    './_base_/schedules/adamw_1x_pvt.py',
    './_base_/runtime.py',
]
