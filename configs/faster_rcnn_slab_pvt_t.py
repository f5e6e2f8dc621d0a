# SLAB-PVT-T: PRepBN, and simplified linear attention over whole maps in all stages.
_base_ = ['./faster_rcnn_prepbn_pvt_t.py']

model = dict(
    backbone=dict(
        attention='sla',
        la_sr_ratios=(1, 1, 1, 1),
        init_cfg=dict(checkpoint='https://github.com/xinghaochen/SLAB/releases/download/ckpts/slab_pvt_tiny.pth'),
    )
)
