# 150 iterations after the 500 that trained the LayerNorm detector: half its learning rate, decay over 65 %.
_base_ = ['../../configs/_base_/schedules/adamw_scratch.py']

max_iters = 150
train_cfg = dict(max_iters=max_iters, val_interval=50)
optim_wrapper = dict(optimizer=dict(lr=2.5e-4))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=20),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=20, end=max_iters, T_max=max_iters - 20, eta_min=2.5e-6),
]
custom_hooks = [
    dict(type='ProgressiveNormHook', decay='linear', total=0.65, unit='fraction'),
    dict(type='RecalibrateFuseHook', num_images=100, pipeline='test'),
]
