# Swin-T with Unified Normalization, in UN's own recipe: 36 epochs. The authors released no Swin weights: the scale and
# shift of Microsoft's LayerNorms are a start.
_base_ = ['./faster_rcnn_swin_t_3x.py']

# M and warm-up of the paper.
model = dict(backbone=dict(norm_cfg=dict(type='UN', window_size=4, warmup_iters=4000)))
custom_hooks = [dict(type='RecalibrateFuseHook')]
