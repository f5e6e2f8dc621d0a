# Swin-T with Moving Average BatchNorm, as UN's Table 3 compares with it: 36 epochs.
_base_ = ['./faster_rcnn_swin_t_3x.py', './_base_/rows/mabn_swin.py']

model = {{_base_.row}}
