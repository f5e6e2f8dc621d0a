# PVT-T-PRepBN, from ImageNet-1K weights of the authors. Their decay is finished: every norm starts at gamma = 0.
_base_ = ['./mask_rcnn_pvt_t.py', './_base_/prepbn.py']

model = dict(
    backbone=dict(
        norm_cfg=dict(_delete_=True, type='PRepBN', ln_eps=1e-6),  # the eps of PVT's LayerNorms
        init_cfg=dict(checkpoint='https://github.com/xinghaochen/SLAB/releases/download/ckpts/pvt_tiny_prepbn.pth'),
    )
)
