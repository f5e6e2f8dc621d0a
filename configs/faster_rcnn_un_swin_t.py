# Swin-T with Unified Normalization, in UN's own recipe: 36 epochs.
_base_ = [
    './_base_/models/faster_rcnn_swin_t.py',
    './_base_/datasets/coco_detection_ms_crop.py',
    './_base_/schedules/adamw_3x.py',
    './_base_/runtime.py',
]

custom_hooks = [
    dict(type='UnifiedNormHook'),
    dict(type='RecalibrateFuseHook'),
]
model = dict(backbone=dict(
    # The authors released no Swin weights: the scale and shift of Microsoft's LayerNorms are a start for UN's.
    norm_cfg=dict(_delete_=True, type='UN', window_size=4, warmup_iters=4000),  # M and warm-up of the paper
    drop_path_rate=0.2))  # Swin's 36 epochs, and SLAB's
