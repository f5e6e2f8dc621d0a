# PVT-S with LayerNorm.
_base_ = ['./faster_rcnn_pvt_t.py', './_base_/sizes/pvt_s.py']

model = {{_base_.size}}
