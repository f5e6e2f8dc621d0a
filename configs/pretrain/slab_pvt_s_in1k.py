# SLAB-PVT-S.
_base_ = ['./pvt_s_in1k.py', '../_base_/rows/slab_pvt.py']

model = {{_base_.row}}
