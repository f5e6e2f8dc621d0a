# SLAB-PVT-T: PRepBN, and simplified linear attention over whole maps in all stages.
_base_ = ['./mask_rcnn_pvt_t.py', './_base_/prepbn.py']

model = dict(
    backbone=dict(
        norm_cfg=dict(_delete_=True, type='PRepBN', ln_eps=1e-6),  # the eps of PVT's LayerNorms
        attention='sla',
        la_sr_ratios=(1, 1, 1, 1),
        init_cfg=dict(checkpoint='https://github.com/xinghaochen/SLAB/releases/download/ckpts/slab_pvt_tiny.pth'),
    )
)
