# SLAB-PVT-T: PRepBN, and simplified linear attention over whole maps in all stages.
_base_ = ['./faster_rcnn_pvt_t.py', './_base_/rows/slab_pvt.py']

model = dict(
    backbone=dict(
        _base_.row.backbone,
        init_cfg=dict(checkpoint='https://github.com/xinghaochen/SLAB/releases/download/ckpts/slab_pvt_tiny.pth'),
    )
)
