# Swin-T with Unified Normalization, in UN's own recipe: 36 epochs.
_base_ = ['./faster_rcnn_swin_t_3x.py', './_base_/rows/un_swin.py']

model = {{_base_.row}}
