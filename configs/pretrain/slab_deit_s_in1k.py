# SLAB-DeiT-S.
_base_ = ['./slab_deit_t_in1k.py', '../_base_/sizes/deit_s.py']

model = {{_base_.size}}
