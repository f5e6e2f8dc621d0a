# Swin-S-PRepBN; no recipe of it was released.
_base_ = ['./swin_s_in1k.py', '../_base_/rows/prepbn_swin.py']

model = {{_base_.row}}
