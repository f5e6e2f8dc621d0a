# BN+FFNBN: one more BatchNorm in each FFN.
_base_ = ['./bn_swin.py']

row = dict(backbone=dict(ffn_norm='pre_act'))
