# PVT-S.
size = dict(
    backbone=dict(
        num_layers=(3, 4, 6, 3),
        init_cfg=dict(checkpoint='https://github.com/whai362/PVT/releases/download/v2/pvt_small.pth'),
    )
)
