# Swin-S with LayerNorm.
_base_ = ['./mask_rcnn_swin_t.py']

model = dict(
    backbone=dict(
        depths=(2, 2, 18, 2),
        drop_path_rate=0.2,  # the released code of SLAB: 0.1 for T, 0.2 for S
        init_cfg=dict(
            checkpoint='https://github.com/SwinTransformer/storage/releases/download/v1.0.0/'
            'swin_small_patch4_window7_224.pth'
        ),
    )
)
