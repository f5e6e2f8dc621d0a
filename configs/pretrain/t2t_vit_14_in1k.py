# T2T-ViT-14 of mmpretrain with LayerNorm, by the recipe of UN's released code: 5e-4 at batch 512, 10 epochs of warm-up,
# 10 more at the lowest rate, no clipping, averaged weights. That code has performers in the tokens-to-token module,
# mmpretrain transformers.
_base_ = ['../_base_/in1k.py', 'mmpretrain::_base_/models/t2t-vit-t-14.py']

custom_hooks = [dict(type='EMAHook', momentum=4e-5, priority='ABOVE_NORMAL')]
optim_wrapper = dict(
    optimizer=dict(lr=5e-4), clip_grad=None, paramwise_cfg=dict(custom_keys={'cls_token': dict(decay_mult=0.0)})
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.002, end=10, convert_to_iter_based=True),
    dict(type='CosineAnnealingLR', T_max=290, begin=10, end=300, eta_min=1e-5),
]
train_cfg = dict(max_epochs=310)
auto_scale_lr = dict(base_batch_size=512)
