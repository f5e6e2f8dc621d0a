# 36 epochs at batch 16, as in Tables 3 and 4 of UN: Swin's own long schedule.
_base_ = ['./adamw_1x.py']

train_cfg = dict(max_epochs=36)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.001, by_epoch=False, begin=0, end=500),
    dict(type='MultiStepLR', by_epoch=True, begin=0, end=36, milestones=[27, 33], gamma=0.1),
]
