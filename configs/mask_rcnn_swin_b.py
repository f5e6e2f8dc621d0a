# Swin-B with LayerNorm.
_base_ = ['./mask_rcnn_swin_t.py', './_base_/sizes/swin_b.py']

model = {{_base_.size}}
