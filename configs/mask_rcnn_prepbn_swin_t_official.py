# The recipe of the released detection code: LayerNorm on the four outputs, decay finished before, statistics frozen
# at their ImageNet values. Fusing keeps the four LayerNorms and says so.
_base_ = ['./mask_rcnn_prepbn_swin_t.py']

custom_hooks = [
    dict(type='ProgressiveNormHook', total=0),
    dict(type='RecalibrateFuseHook', recalibrate=False),
]
model = dict(backbone=dict(out_norm_cfg=dict(type='LN'), norm_eval=True))
