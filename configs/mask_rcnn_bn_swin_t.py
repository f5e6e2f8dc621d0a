# Swin-T with BatchNorm, as UN's Table 4 compares with it: 36 epochs.
_base_ = ['./mask_rcnn_swin_t_3x.py', './_base_/rows/bn_swin.py']

model = {{_base_.row}}
