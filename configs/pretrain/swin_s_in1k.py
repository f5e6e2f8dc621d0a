# Swin-S with LayerNorm.
_base_ = ['./swin_t_in1k.py']

model = dict(backbone=dict(depths=(2, 2, 18, 2), drop_path_rate=0.3))
