# Swin-T with LayerNorm.
_base_ = [
    './_base_/models/faster_rcnn_swin_t.py',
    './_base_/datasets/coco_detection_ms_crop.py',
    './_base_/schedules/adamw_1x.py',
    './_base_/runtime.py',
]
