# SLAB-Swin-T. gamma falls over the first 60,000 of 375,300 iterations.
_base_ = ['./swin_t_in1k.py', '../_base_/rows/slab_swin.py']

model = {{_base_.row}}
custom_hooks = [dict(type='ProgressiveNormHook', total=60000 / 375300), dict(type='RecalibrateFuseHook')]
