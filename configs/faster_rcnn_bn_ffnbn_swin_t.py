# Swin-T with BatchNorm for every LayerNorm and one more in each FFN (BN+FFNBN). Neither paper prints this row; the
# BatchNorm that UN compares with has 36 epochs, so it has them here too.
_base_ = [
    './_base_/models/faster_rcnn_swin_t.py',
    './_base_/datasets/coco_detection_ms_crop.py',
    './_base_/schedules/adamw_3x.py',
    './_base_/runtime.py',
]

custom_hooks = [dict(type='RecalibrateFuseHook')]
model = dict(backbone=dict(
    # No weights were released: the scale and shift of Microsoft's LayerNorms are a start for those of the BatchNorms.
    norm_cfg=dict(_delete_=True, type='TokenBN'),
    ffn_norm='pre_act',
    drop_path_rate=0.2))  # Swin's 36 epochs, and SLAB's
