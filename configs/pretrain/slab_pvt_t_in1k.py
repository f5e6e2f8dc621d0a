# SLAB-PVT-T, without drop-path as in the released code.
_base_ = ['./pvt_t_in1k.py', '../_base_/rows/slab_pvt.py']

model = dict(backbone=dict(_base_.row.backbone, drop_path_rate=0.0))
