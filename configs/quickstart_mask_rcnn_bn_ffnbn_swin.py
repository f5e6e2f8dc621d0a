# The quick start: BN+FFNBN on generated images, with recalibration and fusion.
_base_ = ['./quickstart_mask_rcnn_swin.py']

custom_hooks = [dict(type='RecalibrateFuseHook', num_images=100)]
model = dict(backbone=dict(norm_cfg=dict(type='TokenBN'), ffn_norm='pre_act'))
