# SLAB-Swin-S.
_base_ = ['./slab_swin_t_in1k.py', '../_base_/sizes/swin_s.py']

model = dict(backbone=dict(depths=_base_.size.backbone.depths, drop_path_rate=0.3))
