# Swin-T with BatchNorm for every LayerNorm and one more in each FFN (BN+FFNBN). Neither paper prints this row; the
# BatchNorm that UN compares with has 36 epochs, so it has them here too.
_base_ = ['./mask_rcnn_bn_swin_t_3x.py']

model = dict(backbone=dict(ffn_norm='pre_act'))
