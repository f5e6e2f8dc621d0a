# Swin-T-PRepBN, every norm progressive, the four output norms included: the paper's row. On images that differ more
# than COCO's, a small net gained 0.02 mask AP by out_norm_cfg=dict(type='LN') and 0.045 by ffn_norm='pre_act', which is
# fused away (docs/results.md).
_base_ = ['./mask_rcnn_swin_t.py', './_base_/rows/prepbn_swin.py']

model = dict(
    backbone=dict(
        norm_cfg={{_base_.row.backbone.norm_cfg}},
        # ImageNet-1K weights of the authors. Their decay is finished: those norms start at gamma = 0, while the output
        # norms, which no classifier has, start at 1. Microsoft's LayerNorm weights start everything at 1.
        init_cfg=dict(checkpoint='https://github.com/xinghaochen/SLAB/releases/download/ckpts/swin_tiny_prepbn.pth'),
    )
)
