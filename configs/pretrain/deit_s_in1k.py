# DeiT-S with LayerNorm.
_base_ = ['./deit_t_in1k.py', '../_base_/sizes/deit_s.py']

model = {{_base_.size}}
