# The short way from a trained LayerNorm detector to one without norms: a quarter of the 1x schedule, starting from
# weights that tools/convert_checkpoint.py wrote. The detector is trained already: half of the 1x learning rate, and a
# decay that leaves the last third of the run to pure RepBN.
_base_ = ['./adamw_1x.py']

max_epochs = 3
train_cfg = dict(max_epochs=max_epochs)
optim_wrapper = dict(optimizer=dict(lr=5e-5))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=500),
    dict(
        type='CosineAnnealingLR', by_epoch=True, begin=0, end=max_epochs, T_max=max_epochs, convert_to_iter_based=True
    ),
]
custom_hooks = [
    dict(type='ProgressiveNormHook', decay='linear', total=0.65, unit='fraction'),
    dict(type='RecalibrateFuseHook'),
]
