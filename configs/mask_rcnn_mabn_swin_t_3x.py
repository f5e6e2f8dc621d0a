# Swin-T with Moving Average BatchNorm, as UN's Table 4 compares with it: 36 epochs, from the scale and shift of
# Microsoft's LayerNorms.
_base_ = ['./mask_rcnn_swin_t_3x.py']

model = dict(backbone=dict(norm_cfg=dict(type='MABN')))
custom_hooks = [dict(type='RecalibrateFuseHook')]
