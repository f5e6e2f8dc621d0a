# Swin-T with BatchNorm over all tokens, as UN's Table 4 compares with it: 36 epochs. No such weights were released:
# the scale and shift of Microsoft's LayerNorms are a start.
_base_ = ['./mask_rcnn_swin_t_3x.py']

model = dict(backbone=dict(norm_cfg=dict(type='TokenBN')))
custom_hooks = [dict(type='RecalibrateFuseHook')]
