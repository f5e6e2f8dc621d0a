# PVT-S with LayerNorm.
_base_ = ['./mask_rcnn_pvt_t.py']

model = dict(
    backbone=dict(
        num_layers=(3, 4, 6, 3),
        init_cfg=dict(checkpoint='https://github.com/whai362/PVT/releases/download/v2/pvt_small.pth'),
    )
)
