# SLAB-CSWin-T: PRepBN, and simplified linear attention over whole maps in the first two stages.
_base_ = ['./mask_rcnn_cswin_t.py', './_base_/prepbn.py']

model = dict(
    backbone=dict(
        depths=(2, 4, 18, 1),
        drop_path_rate=0.1,
        norm_cfg=dict(type='PRepBN'),
        attention=('sla', 'sla', 'softmax', 'softmax'),
        stripe_widths=(None, None, 7, None),
        init_cfg=dict(checkpoint='https://github.com/xinghaochen/SLAB/releases/download/ckpts/slab_cswin_tiny.pth'),
    )
)
