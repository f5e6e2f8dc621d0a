# The short way from a trained LayerNorm detector to one without norms: a quarter of the 1x schedule, starting from
# weights that tools/convert_checkpoint.py wrote. The detector is trained already: half of the 1x learning rate, and a
# decay that leaves the last third of the run to pure RepBN.
_base_ = ['./adamw_1x.py']

train_cfg = dict(max_epochs=3)
optim_wrapper = dict(optimizer=dict(lr=5e-5))
param_scheduler = [
    # Parts of epochs: 500 iterations would be longer than the whole run on a small data set.
    dict(type='LinearLR', start_factor=0.01, end=0.5, convert_to_iter_based=True),
    # Without an end, to that of the run.
    dict(type='CosineAnnealingLR', convert_to_iter_based=True),
]
custom_hooks = [
    dict(type='ProgressiveNormHook', decay='linear', total=0.65, unit='fraction'),
    dict(type='RecalibrateFuseHook'),
]
