# Swin-T-PRepBN, with the drop-path of the released code. gamma falls over 4/5 of the run: in that code over 300,000 of
# 375,300 iterations, while Table A1 of the paper prints 0.
_base_ = ['./swin_t_in1k.py', '../_base_/prepbn.py']

model = dict(backbone=dict(norm_cfg=dict(type='PRepBN'), drop_path_rate=0.1))
