# PVT-S with LayerNorm.
_base_ = ['./pvt_t_in1k.py', '../_base_/sizes/pvt_s.py']

model = dict(backbone=dict(num_layers=_base_.size.backbone.num_layers))
