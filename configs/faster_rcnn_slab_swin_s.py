# SLAB-Swin-S: PRepBN, and simplified linear attention in the first two stages.
_base_ = ['./faster_rcnn_prepbn_swin_s.py']

model = dict(
    backbone=dict(
        attention=('sla', 'sla', 'softmax', 'softmax'),
        window_sizes=(56, 28, 7, 7),
        init_cfg=dict(checkpoint='https://github.com/xinghaochen/SLAB/releases/download/ckpts/slab_swin_small.pth'),
    )
)
