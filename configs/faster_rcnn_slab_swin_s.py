# SLAB-Swin-S: PRepBN, and simplified linear attention in the first two stages.
_base_ = ['./faster_rcnn_swin_s.py', './_base_/rows/slab_swin.py']

model = dict(
    backbone=dict(
        _base_.row.backbone,
        init_cfg=dict(checkpoint='https://github.com/xinghaochen/SLAB/releases/download/ckpts/slab_swin_small.pth'),
    )
)
