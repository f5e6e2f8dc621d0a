# The quick start: SLAB-Swin on generated images, progressive norms, recalibration and fusion.
_base_ = ['./quickstart_mask_rcnn_swin.py']

custom_hooks = [
    dict(type='ProgressiveNormHook', decay='linear', total=0.8, unit='fraction'),
    dict(type='RecalibrateFuseHook', num_images=100),
]
model = dict(
    backbone=dict(
        norm_cfg=dict(type='PRepBN'),
        attention=('sla', 'sla', 'softmax', 'softmax'),
        # The papers' 56 and 28 hold the whole map of a 224-pixel image; here a window holds half the rows of 160.
        window_sizes=(20, 20, 7, 7),
    )
)
