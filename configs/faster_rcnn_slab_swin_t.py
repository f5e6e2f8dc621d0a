# SLAB-Swin-T: PRepBN, and simplified linear attention in the first two stages.
_base_ = ['./faster_rcnn_swin_t.py', './_base_/prepbn.py']

model = dict(
    backbone=dict(
        norm_cfg=dict(type='PRepBN'),
        attention=('sla', 'sla', 'softmax', 'softmax'),
        window_sizes=(56, 28, 7, 7),
        init_cfg=dict(checkpoint='https://github.com/xinghaochen/SLAB/releases/download/ckpts/slab_swin_tiny.pth'),
    )
)
