# Swin-S-PRepBN. The authors released no weights of it: Microsoft's LayerNorm ones start every norm at gamma = 1.
_base_ = ['./faster_rcnn_swin_s.py', './_base_/rows/prepbn_swin.py']

model = {{_base_.row}}
