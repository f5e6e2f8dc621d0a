# Swin-S-PRepBN. The authors released no weights of it: Microsoft's LayerNorm ones start every norm at gamma = 1.
_base_ = ['./mask_rcnn_swin_s.py', './_base_/prepbn.py']

model = dict(backbone=dict(norm_cfg=dict(type='PRepBN')))
