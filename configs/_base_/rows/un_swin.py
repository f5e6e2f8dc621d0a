# Unified Normalization. The authors released no Swin weights: the scale and shift of Microsoft's LayerNorms are a start
# for UN's.
_base_ = ['../moving_average_norm.py']

# M and warm-up of the paper.
row = dict(backbone=dict(norm_cfg=dict(type='UN', window_size=4, warmup_iters=4000)))
