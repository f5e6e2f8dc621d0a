# ImageNet-1K at data/imagenet (or --data-root), by Swin's recipe, which SLAB's released code takes over: 300 epochs at
# batch 1024, AdamW at 1e-3, 20 epochs of warm-up, RandAugment, Mixup, CutMix, erasing, smoothed labels. It needs
# mmpretrain: pip install "slab_det[pretrain]".
_base_ = [
    './runtime.py',
    'mmpretrain::_base_/datasets/imagenet_bs64_swin_224.py',
    'mmpretrain::_base_/schedules/imagenet_bs1024_adamw_swin.py',
]

default_scope = 'mmpretrain'
visualizer = dict(_delete_=True, type='UniversalVisualizer', vis_backends=[dict(type='LocalVisBackend')])
optim_wrapper = dict(clip_grad=dict(max_norm=5.0))
