# The short training of a detector that slab_det.absorb made, beside its teacher. It counts iterations: how many are
# needed depends on how far the student is from its teacher, not on the size of the data set. Rates are for batches of 4
# images.
max_iters = 150
train_cfg = dict(type='IterBasedTrainLoop', max_iters=max_iters, val_interval=max_iters)
optim_wrapper = dict(
    type='OptimWrapper',
    # No weight decay: absorbed layers may hold large weights that cancel.
    optimizer=dict(type='AdamW', lr=2.5e-4, betas=(0.9, 0.999), weight_decay=0.0),
    # The full rate first destroys what absorption fitted: on DSB2018 the error of the feature maps rose from 0.006 to
    # 0.31.
    # RTMDet's heads share layers.
    paramwise_cfg=dict(custom_keys={'backbone': dict(lr_mult=0.1)}, bypass_duplicate=True),
    clip_grad=dict(max_norm=5.0),
)
auto_scale_lr = dict(enable=False, base_batch_size=4)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, by_epoch=False, begin=0, end=20),
    dict(type='CosineAnnealingLR', by_epoch=False, begin=20, end=max_iters, T_max=max_iters - 20, eta_min_ratio=0.01),
]
del max_iters
