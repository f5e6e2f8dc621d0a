# Swin-T with LayerNorm for 36 epochs, the baseline of UN's Table 4.
_base_ = [
    './_base_/models/mask_rcnn_swin_t.py',
    './_base_/datasets/coco_instance_ms_crop.py',
    './_base_/schedules/adamw_3x.py',
    './_base_/runtime.py',
]

model = dict(backbone=dict(drop_path_rate=0.2))  # Swin's 36 epochs, and SLAB's
