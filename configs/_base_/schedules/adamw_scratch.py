# From scratch on little data: AdamW at 5e-4, warm-up, cosine, clipped gradients.
_base_ = ['../runtime.py']

max_iters = 500
train_cfg = dict(type='IterBasedTrainLoop', max_iters=max_iters, val_interval=max_iters)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=5e-4, betas=(0.9, 0.999), weight_decay=0.05),
    paramwise_cfg=dict(
        custom_keys={
            'relative_position_bias_table': dict(decay_mult=0.0),
            'norm': dict(decay_mult=0.0),
        }
    ),
    clip_grad=dict(max_norm=5.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=100),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=100, end=max_iters, T_max=max_iters - 100, eta_min=5e-6),
]
default_hooks = dict(checkpoint=dict(by_epoch=False, interval=max_iters), logger=dict(interval=20))
del max_iters
log_processor = dict(by_epoch=False, window_size=20)
randomness = dict(seed=0)
