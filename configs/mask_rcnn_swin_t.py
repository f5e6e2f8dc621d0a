# Swin-T with LayerNorm, the baseline of SLAB's Table 3.
_base_ = [
    './_base_/models/mask_rcnn_swin_t.py',
    './_base_/datasets/coco_instance_ms_crop.py',
    './_base_/schedules/adamw_1x.py',
    './_base_/runtime.py',
]
