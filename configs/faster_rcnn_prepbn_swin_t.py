# Swin-T-PRepBN, every norm progressive, the four output norms included.
_base_ = ['./faster_rcnn_swin_t.py', './_base_/prepbn.py']

model = dict(
    backbone=dict(
        norm_cfg=dict(type='PRepBN'),
        # ImageNet-1K weights of the authors. Their decay is finished: those norms start at gamma = 0, while the output
        # norms, which no classifier has, start at 1. Microsoft's LayerNorm weights start everything at 1.
        init_cfg=dict(checkpoint='https://github.com/xinghaochen/SLAB/releases/download/ckpts/swin_tiny_prepbn.pth'),
    )
)
