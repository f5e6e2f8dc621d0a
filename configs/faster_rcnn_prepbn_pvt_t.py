# PVT-T-PRepBN, from ImageNet-1K weights of the authors. Their decay is finished: every norm starts at gamma = 0.
_base_ = ['./faster_rcnn_pvt_t.py', './_base_/rows/prepbn_pvt.py']

model = dict(
    backbone=dict(
        norm_cfg={{_base_.row.backbone.norm_cfg}},
        init_cfg=dict(checkpoint='https://github.com/xinghaochen/SLAB/releases/download/ckpts/pvt_tiny_prepbn.pth'),
    )
)
