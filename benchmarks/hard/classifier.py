# A classifier of the crops that benchmarks/hard/make_data.py writes; train.py gives width, classes and seed.
_base_ = ['../../configs/_base_/models/classifier.py', '../../configs/_base_/schedules/adamw_scratch.py']

custom_imports = dict(imports=['slab_det', 'benchmarks.hard.bfloat16'], allow_failed_imports=False)
default_scope = 'mmpretrain'
visualizer = dict(_delete_=True, type='UniversalVisualizer', vis_backends=[dict(type='LocalVisBackend')])
data_preprocessor = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], to_rgb=True)  # the detector's
model = dict(
    data_preprocessor=data_preprocessor,
    backbone=dict(type='mmdet.SLABSwin', depths=(2, 2, 4, 2), num_heads=(3, 6, 12, 24), out_indices=(3,)),
    # A crop beside another one would be no crop of the detector's images.
    train_cfg=dict(_delete_=True),
)
loader = dict(num_workers=0, persistent_workers=False, collate_fn=dict(type='default_collate'))
folder = dict(type='CustomDataset', data_root='data/hard', with_label=True)
load, pack = dict(type='LoadImageFromFile'), dict(type='PackInputs')
flip = dict(type='RandomFlip', prob=0.5, direction='horizontal')
train_dataloader = dict(
    batch_size=96,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        folder,
        data_prefix='crops/train',
        pipeline=[load, flip, pack],
    ),
    **loader,
)
val_dataloader = dict(
    batch_size=96,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(folder, data_prefix='crops/val', pipeline=[load, pack]),
    **loader,
)
val_evaluator = dict(type='Accuracy', topk=1)
test_dataloader, test_evaluator = val_dataloader, val_evaluator
optim_wrapper = dict(type='PartsInBFloat16', parts=['backbone'], optimizer=dict(lr=1e-3))
