# Flatten-Swin-T; _base_/rows/flatten_swin.py says where it starts.
_base_ = ['./faster_rcnn_swin_t.py', './_base_/rows/flatten_swin.py']

model = {{_base_.row}}
