# SLAB-CSWin-T: PRepBN, and simplified linear attention over whole maps in the first two stages.
_base_ = ['./mask_rcnn_cswin_t.py', './_base_/prepbn.py', './_base_/rows/slab_cswin.py']

model = dict(
    backbone=dict(
        _base_.row.backbone,
        depths=(2, 4, 18, 1),
        init_cfg=dict(checkpoint='https://github.com/xinghaochen/SLAB/releases/download/ckpts/slab_cswin_tiny.pth'),
    )
)
