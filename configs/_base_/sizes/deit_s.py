# DeiT-S.
size = dict(backbone=dict(embed_dims=384, num_heads=6), head=dict(in_channels=384))
