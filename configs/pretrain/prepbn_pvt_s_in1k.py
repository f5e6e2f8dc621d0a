# PVT-S-PRepBN.
_base_ = ['./pvt_s_in1k.py', '../_base_/rows/prepbn_pvt.py']

model = {{_base_.row}}
