# Swin-B: Swin-S with 4/3 of its width.
size = dict(
    backbone=dict(
        embed_dims=128,
        depths=(2, 2, 18, 2),
        num_heads=(4, 8, 16, 32),
        drop_path_rate=0.3,  # Microsoft's Cascade Mask R-CNN; SLAB has no detector of this size
        init_cfg=dict(
            checkpoint='https://github.com/SwinTransformer/storage/releases/download/v1.0.0/'
            'swin_base_patch4_window7_224.pth'
        ),
    ),
    neck=dict(in_channels=[128, 256, 512, 1024]),
)
