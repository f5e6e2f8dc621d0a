# PVT-M with LayerNorm.
_base_ = ['./mask_rcnn_pvt_t.py', './_base_/sizes/pvt_m.py']

model = {{_base_.size}}
