# Flatten-Swin-S; _base_/rows/flatten_swin.py says where it starts.
_base_ = ['./faster_rcnn_swin_s.py', './_base_/rows/flatten_swin.py']

model = {{_base_.row}}
