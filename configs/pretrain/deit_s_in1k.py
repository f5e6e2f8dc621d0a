# DeiT-S with LayerNorm.
_base_ = ['./deit_t_in1k.py']

model = dict(backbone=dict(embed_dims=384, num_heads=6), head=dict(in_channels=384))
