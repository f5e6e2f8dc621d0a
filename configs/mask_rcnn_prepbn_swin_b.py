# Swin-B-PRepBN. The authors released no weights of it: Microsoft's LayerNorm ones start every norm at gamma = 1.
_base_ = ['./mask_rcnn_swin_b.py', './_base_/rows/prepbn_swin.py']

model = {{_base_.row}}
