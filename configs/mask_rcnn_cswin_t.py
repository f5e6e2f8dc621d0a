# CSWin-T with LayerNorm, by the recipe of the Swin rows.
_base_ = [
    './_base_/models/mask_rcnn_cswin_t.py',
    './_base_/datasets/coco_instance_ms_crop.py',
    './_base_/schedules/adamw_1x.py',
    './_base_/runtime.py',
]
