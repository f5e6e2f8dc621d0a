"""The norm studies: which runs each one compares, and what a run changes in the config of its benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Base:
    """A dataset and the LayerNorm detector that is trained on it from scratch.

    Attributes:
        name: Also the folder of its runs, and of its data below data/.
        config: Relative to the repository.
        metric: 'bbox' or 'segm': what tables and pictures show.
        changes: What all runs change.
        setting: In words, for results and pictures.
    """

    name: str
    config: Path
    metric: str
    changes: dict
    setting: str


@dataclass(frozen=True)
class Run:
    """One line of a table, trained once per seed; studies that name it share its folder.

    Attributes:
        name: Also its folder.
        label: Its name in tables and pictures.
        changes: Merged into the base config one after the other, as mmengine merges dicts; lists are replaced.
        setting: What it shares with its control and not with the base; a picture has one row per setting.
        control: The run that it is compared with, seed by seed.
        keep_trained: Keep the checkpoint as it was before the recalibration, as ``trained.pth``.
    """

    name: str
    label: str
    changes: tuple[dict, ...] = ()
    setting: str = ''
    control: str = 'ln'
    keep_trained: bool = False


@dataclass(frozen=True)
class Recalibration:
    """A trained run evaluated with the statistics of ``num_images`` training images; 0: as it was trained.

    ``passes`` cuts the recalibration short; None: until nothing changes. ``pipeline``: see ``RecalibrateFuseHook``.
    """

    run: Run
    num_images: int
    passes: int | None = None
    pipeline: str = 'test'

    @property
    def how(self) -> str:
        seen = '' if self.pipeline == 'test' else f'-{self.pipeline}'
        return f'{self.num_images}{seen}x{self.passes}' if self.passes else f'{self.num_images}{seen}'

    @property
    def name(self) -> str:
        return f'{self.run.name}@{self.how}'

    @property
    def label(self) -> str:
        if not self.num_images:
            return 'as trained'
        return (
            f'{self.num_images} images'
            + (' as in training' if self.pipeline == 'train' else '')
            + (f', cut short after pass {self.passes}' if self.passes else '')
        )

    @property
    def setting(self) -> str:
        return ', '.join(filter(None, [self.run.label, self.run.setting]))

    @property
    def control(self) -> str:
        return f'{self.run.name}@0'


@dataclass(frozen=True)
class Study:
    """Runs that answer one question."""

    name: str
    base: Base
    question: str
    runs: tuple[Run, ...]
    recalibrations: tuple[Recalibration, ...] = ()


def lasting(iterations: int, validations: int) -> dict:
    """The schedule of the base configs, of another length, with checkpoints to resume from."""
    return dict(
        max_iters=iterations,
        train_cfg=dict(max_iters=iterations, val_interval=iterations // validations),
        param_scheduler=[
            dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=100),
            dict(
                type='CosineAnnealingLR',
                by_epoch=False,
                begin=100,
                end=iterations,
                T_max=iterations - 100,
                eta_min=5e-6,
            ),
        ],
        default_hooks=dict(
            checkpoint=dict(interval=iterations // 5, max_keep_ckpts=1),
            # Validations are logged with their iteration, not with epoch 0.
            logger=dict(log_metric_by_epoch=False),
            statistics_drift=dict(type='StatisticsDriftHook'),
        ),
        custom_imports=dict(imports=['slab_det', 'benchmarks.norms.drift', 'benchmarks.norms.no_eta']),
        # LayerNorm; the other norms bring it with their own hooks.
        custom_hooks=[STOP_AT_NAN],
    )


def norm(cfg: dict, *hooks: dict, recalibration_images: int = 100, **backbone: object) -> dict:
    """A norm in every place of the backbone, what it needs in training, and the end without norms."""
    return dict(
        model=dict(backbone=dict(norm_cfg=cfg, **backbone)),
        # The studies measured images as inference sees them; the 'pipeline' rows say what images of training change.
        custom_hooks=[
            STOP_AT_NAN,
            *hooks,
            dict(type='RecalibrateFuseHook', num_images=recalibration_images, pipeline='test'),
        ],
    )


def prepbn(*hooks: dict, decay: str = 'linear', total: float = 0.8, **options: object) -> dict:
    """PRepBN with a decay of gamma."""
    return norm(
        dict(type='PRepBN'),
        dict(type='ProgressiveNormHook', decay=decay, total=total, unit='fraction'),
        *hooks,
        **options,
    )


def moving(cfg: dict, iterations: int, **options: object) -> dict:
    """UN, MABN or PowerNorm, with a warm-up of a tenth of the run.

    The warm-ups of their papers (UN 4000, PowerNorm 10000 iterations) are longer than these runs; MABN's 100 is
    scaled with them, so that the three differ in nothing but their averages.
    """
    return norm(dict(**cfg, warmup_iters=iterations // 10), **options)


# A diverged run ends at once, as failed, and not an hour later with AP 0.
STOP_AT_NAN = dict(type='CheckInvalidLossHook', interval=10)

BCCD_ITERATIONS = 800
BCCD = Base(
    'bccd',
    Path('benchmarks/bccd/faster_rcnn_swin_small.py'),
    'bbox',
    lasting(BCCD_ITERATIONS, 5),
    'BCCD: 292 training, 72 validation images at 320x240; Faster R-CNN, Swin-32x2222, 800 iterations of 4 images',
)
DSB2018_ITERATIONS = 500
DSB2018 = Base(
    # Its validation takes as long as a hundred iterations.
    'dsb2018',
    Path('benchmarks/dsb2018/mask_rcnn_swin_small.py'),
    'segm',
    lasting(DSB2018_ITERATIONS, 1),
    'DSB2018: 531 training images in crops of 256x256, 133 validation images at 512x512; Mask R-CNN, Swin-32x2222, '
    '500 iterations of 4 images',
)

UN = dict(type='UN', window_size=4)
WARMUP = 'warm-up 10 %'
LN_RUN = Run('ln', 'LayerNorm')
PREPBN_RUN = Run('prepbn', 'PRepBN, linear', (prepbn(),), keep_trained=True)
# On the maps of 80x64 and 40x32: half of the rows, and all of them, as in the quick start.
SLA = dict(attention=('sla', 'sla', 'softmax', 'softmax'), window_sizes=(32, 32, 7, 7))

BCCD_NORMS = Study(
    'bccd-norms',
    BCCD,
    'Which norm keeps the AP of LayerNorm?',
    (
        LN_RUN,
        Run('token_bn', 'TokenBN', (norm(dict(type='TokenBN')),)),
        Run('bn_ffnbn', 'BN+FFNBN', (norm(dict(type='TokenBN'), ffn_norm='pre_act'),)),
        # Table 7 of SLAB: BN, then with progression, then with eta.
        Run('progressive_bn', 'PRepBN, linear, eta fixed at 0', (prepbn(dict(type='NoEtaHook')),)),
        Run('repbn', 'RepBN, no progression', (norm(dict(type='RepBN')),)),
        PREPBN_RUN,
        Run('prepbn_cosine', 'PRepBN, cosine', (prepbn(decay='cosine'),)),
        Run('prepbn_step', 'PRepBN, step', (prepbn(decay='step'),)),
        Run('un', f'UN, {WARMUP}', (moving(UN, BCCD_ITERATIONS),)),
        Run(
            'un_unfiltered', f'UN, {WARMUP}, no filtration', (moving(dict(UN, filter_outliers=False), BCCD_ITERATIONS),)
        ),
        Run('mabn', f'MABN, {WARMUP}', (moving(dict(type='MABN'), BCCD_ITERATIONS),)),
        Run('powernorm', f'PowerNorm, {WARMUP}', (moving(dict(type='PowerNorm'), BCCD_ITERATIONS),)),
    ),
)

BCCD_ATTENTION = Study(
    'bccd-attention',
    BCCD,
    'Does the answer change with simplified linear attention?',
    (
        LN_RUN,
        PREPBN_RUN,
        Run('sla_ln', 'LayerNorm', (dict(model=dict(backbone=SLA)),), 'SLA attention', 'sla_ln'),
        Run('sla_prepbn', 'PRepBN, linear', (prepbn(**SLA),), 'SLA attention', 'sla_ln'),
    ),
)

BCCD_DECAY = Study(
    'bccd-decay',
    BCCD,
    'How long should the decay of gamma be?',
    (
        LN_RUN,
        *(Run(f'prepbn_t{total}', f'PRepBN, T = {total}', (prepbn(total=total),)) for total in (0.0, 0.2, 0.5)),
        # T = 0.8.
        PREPBN_RUN,
        Run('prepbn_t1.0', 'PRepBN, T = 1.0', (prepbn(total=1.0),)),
    ),
)


def norms_in(
    name: str, setting: str, change: dict, iterations: int = BCCD_ITERATIONS, keep_trained: bool = False
) -> tuple[Run, ...]:
    """The main four norms in another setting; LayerNorm in the same setting is the control."""
    control = f'{name}_ln'
    changes = (change,) if iterations == BCCD_ITERATIONS else (lasting(iterations, 5), change)
    return (
        Run(control, 'LayerNorm', changes, setting, control),
        Run(
            f'{name}_token_bn',
            'TokenBN',
            (*changes, norm(dict(type='TokenBN'))),
            setting,
            control,
            keep_trained=keep_trained,
        ),
        Run(f'{name}_prepbn', 'PRepBN, linear', (*changes, prepbn()), setting, control, keep_trained=keep_trained),
        Run(f'{name}_un', f'UN, {WARMUP}', (*changes, moving(UN, iterations)), setting, control),
    )


def swin(embed_dims: int, depths: tuple[int, ...], **options: object) -> dict:
    """A backbone of another width and depth, and the neck that fits."""
    return dict(
        model=dict(
            backbone=dict(embed_dims=embed_dims, depths=depths, **options),
            neck=dict(in_channels=[embed_dims * 2**stage for stage in range(4)]),
        )
    )


DROP_PATH_03 = norms_in(
    'drop_path_0.3', 'drop-path 0.3', dict(model=dict(backbone=dict(drop_path_rate=0.3))), keep_trained=True
)
DROP_PATH_03_PREPBN = DROP_PATH_03[2]
LR_4 = dict(optim_wrapper=dict(optimizer=dict(lr=2e-3)))
DEEP_12 = swin(24, (2, 2, 12, 2))

BCCD_HARD = Study(
    'bccd-hard',
    BCCD,
    'Where does BatchNorm fail, and does PRepBN fail with it?',
    (
        *norms_in('deep6', 'depths 2,2,6,2', swin(32, (2, 2, 6, 2))),
        *norms_in('deep12', 'depths 2,2,12,2, embed 24', DEEP_12),
        *DROP_PATH_03,
        *norms_in('lr4', 'learning rate 2e-3', LR_4),
        *norms_in('deep12_lr4', 'depths 2,2,12,2, embed 24, learning rate 2e-3', {**DEEP_12, **LR_4}),
        # The same learning rate. So many iterations take about as long as 800 of 4 images.
        *norms_in('batch2', 'batch 2, 1200 iterations', dict(train_dataloader=dict(batch_size=2)), 1200),
        *norms_in('batch1', 'batch 1, 2000 iterations', dict(train_dataloader=dict(batch_size=1)), 2000),
    ),
)


def paramwise(key: str, **multipliers: float) -> dict:
    """Other multipliers for the parameters whose name contains ``key``; the longest key of a name counts."""
    return dict(optim_wrapper=dict(paramwise_cfg=dict(custom_keys={key: multipliers})))


def optimizer_choices(**options: object) -> tuple[Run, ...]:
    """PRepBN with another learning rate of eta, or with the weight decay that norms are spared otherwise."""
    return (
        Run(
            'prepbn_weight_decay',
            'PRepBN, weight decay of norms',
            (prepbn(**options), paramwise('norm', decay_mult=1.0)),
        ),
        *(
            Run(
                f'prepbn_eta_lr_{factor}',
                f'PRepBN, learning rate of eta x{factor}',
                (prepbn(**options), paramwise('repbn.eta', lr_mult=float(factor), decay_mult=0.0)),
            )
            for factor in ('0.1', '10')
        ),
    )


def twice_as_long(iterations: int, validations: int, **options: object) -> tuple[Run, ...]:
    """LayerNorm and PRepBN."""
    schedule, setting = lasting(2 * iterations, validations), 'twice the iterations'
    return (
        Run('long_ln', 'LayerNorm', (schedule,), setting, 'long_ln'),
        Run('long_prepbn', 'PRepBN, linear', (schedule, prepbn(**options)), setting, 'long_ln'),
    )


BCCD_CHOICES = Study(
    'bccd-choices',
    BCCD,
    'What brings PRepBN level with LayerNorm?',
    (
        LN_RUN,
        # Drop-path 0, output norms PRepBN, no weight decay of norms, learning rate of eta as of everything else.
        PREPBN_RUN,
        Run('drop_path_0.1_prepbn', 'PRepBN, drop-path 0.1', (prepbn(drop_path_rate=0.1),), keep_trained=True),
        # Its control has drop-path too.
        *DROP_PATH_03[::2],
        Run('prepbn_out_norm_ln', 'PRepBN, output norms LayerNorm', (prepbn(out_norm_cfg=dict(type='LN')),)),
        *optimizer_choices(),
        *twice_as_long(BCCD_ITERATIONS, 5),
    ),
)

# Neither dataset pads as COCO does: on BCCD every image, in training and at test time, has the same 16 rows below its
# 240; on DSB2018 all crops are 256x256 but those of 5 images. So images of several sizes share a batch here, and are
# padded to the largest; they are tested at one size.
SEVERAL_SIZES = dict(
    train_dataloader=dict(
        dataset=dict(
            pipeline=[
                dict(type='LoadImageFromFile'),
                dict(type='LoadAnnotations', with_bbox=True),
                dict(type='RandomResize', scale=(320, 240), ratio_range=(0.5, 1.25), keep_ratio=True),
                dict(type='RandomFlip', prob=0.5, direction=['horizontal', 'vertical']),
                dict(type='PackDetInputs'),
            ]
        )
    )
)
PADDED = norms_in('padded', 'images of several sizes, padded', SEVERAL_SIZES, keep_trained=True)
BCCD_PADDING = Study(
    'bccd-padding',
    BCCD,
    'What do padded batches do to the norms?',
    PADDED,
)
BCCD_PIPELINE_RUNS = tuple(run for run in BCCD_PADDING.runs if run.keep_trained)
BCCD_PIPELINE = Study(
    'bccd-pipeline',
    BCCD,
    'Statistics of images as inference sees them, or as training did?',
    BCCD_PIPELINE_RUNS,
    tuple(Recalibration(run, *how) for run in BCCD_PIPELINE_RUNS for how in ((0,), (100,), (100, None, 'train'))),
)

# A validation image is four times as large as a training crop, and so is one to recalibrate on.
FEW = dict(recalibration_images=50)
DSB2018_PREPBN = Run('prepbn', 'PRepBN, linear', (prepbn(**FEW),), keep_trained=True)
DSB2018_REPBN = Run('prepbn_t0.0', 'PRepBN, T = 0 (RepBN)', (prepbn(total=0.0, **FEW),))
DSB2018_FFNBN = Run('bn_ffnbn', 'BN+FFNBN', (norm(dict(type='TokenBN'), ffn_norm='pre_act', **FEW),), keep_trained=True)
# What BN+FFNBN has and PRepBN has not.
DSB2018_PREPBN_FFN = Run('prepbn_ffn_norm', 'PRepBN, one more in each FFN', (prepbn(ffn_norm='pre_act', **FEW),))
DSB2018_NORMS = Study(
    'dsb2018-norms',
    DSB2018,
    'Which norm keeps the AP of LayerNorm where images differ?',
    (
        LN_RUN,
        Run('token_bn', 'TokenBN', (norm(dict(type='TokenBN'), **FEW),), keep_trained=True),
        DSB2018_FFNBN,
        Run('progressive_bn', 'PRepBN, linear, eta fixed at 0', (prepbn(dict(type='NoEtaHook'), **FEW),)),
        DSB2018_REPBN,
        DSB2018_PREPBN,
        Run('un', f'UN, {WARMUP}', (moving(UN, DSB2018_ITERATIONS, **FEW),), keep_trained=True),
        Run(
            'un_unfiltered',
            f'UN, {WARMUP}, no filtration',
            (moving(dict(UN, filter_outliers=False), DSB2018_ITERATIONS, **FEW),),
        ),
        Run('mabn', f'MABN, {WARMUP}', (moving(dict(type='MABN'), DSB2018_ITERATIONS, **FEW),)),
        Run('powernorm', f'PowerNorm, {WARMUP}', (moving(dict(type='PowerNorm'), DSB2018_ITERATIONS, **FEW),)),
    ),
)
DSB2018_CHOICES = Study(
    'dsb2018-choices',
    DSB2018,
    'What brings PRepBN level with LayerNorm where images differ?',
    (
        LN_RUN,
        DSB2018_REPBN,
        *(Run(f'prepbn_t{total}', f'PRepBN, T = {total}', (prepbn(total=total, **FEW),)) for total in (0.2, 0.5)),
        # T = 0.8.
        DSB2018_PREPBN,
        Run('prepbn_t1.0', 'PRepBN, T = 1.0', (prepbn(total=1.0, **FEW),)),
        Run('prepbn_out_norm_ln', 'PRepBN, output norms LayerNorm', (prepbn(out_norm_cfg=dict(type='LN'), **FEW),)),
        # Whether it takes PRepBN in the other places.
        Run(
            'token_bn_out_norm_ln',
            'TokenBN, output norms LayerNorm',
            (norm(dict(type='TokenBN'), out_norm_cfg=dict(type='LN'), **FEW),),
        ),
        DSB2018_PREPBN_FFN,
        Run('prepbn_drop_path_0.1', 'PRepBN, drop-path 0.1', (prepbn(drop_path_rate=0.1, **FEW),)),
        *optimizer_choices(**FEW),
        *twice_as_long(DSB2018_ITERATIONS, 1, **FEW),
    ),
)
DSB2018_FFN_NORM = Study(
    'dsb2018-ffn-norm',
    DSB2018,
    'Is it BatchNorm that gains by a norm in each FFN?',
    (
        LN_RUN,
        # Not fused: this one stays at inference.
        Run('ln_ffn_norm', 'LayerNorm, one more in each FFN', (dict(model=dict(backbone=dict(ffn_norm='pre_act'))),)),
        DSB2018_FFNBN,
        DSB2018_PREPBN_FFN,
    ),
)

# 292 are all of them.
RECALIBRATED = tuple(run for run in BCCD_CHOICES.runs if run.keep_trained)
BCCD_RECALIBRATION = Study(
    'bccd-recalibration',
    BCCD,
    'What does the recalibration change, and how many images does it need?',
    RECALIBRATED,
    tuple(
        Recalibration(run, *how) for run in RECALIBRATED for how in ((0,), (10,), (100,), (292,), (100, None, 'train'))
    ),
)
# As trained; cut short; in full; and on other numbers of the 531 images. A crop is a quarter of an image.
DSB2018_RECALIBRATED = tuple(run for run in DSB2018_NORMS.runs if run.keep_trained)
DSB2018_RECALIBRATION = Study(
    'dsb2018-recalibration',
    DSB2018,
    'What does the recalibration change where images differ?',
    DSB2018_RECALIBRATED,
    tuple(
        Recalibration(run, *how)
        for run in DSB2018_RECALIBRATED
        for how in ((0,), (50, 1), (50, 8), (50,), (10,), (200,), (200, None, 'train'))
    ),
)

STUDIES = {
    study.name: study
    for study in (
        BCCD_NORMS,
        BCCD_ATTENTION,
        BCCD_DECAY,
        BCCD_CHOICES,
        BCCD_HARD,
        BCCD_PADDING,
        BCCD_PIPELINE,
        BCCD_RECALIBRATION,
        DSB2018_NORMS,
        DSB2018_CHOICES,
        DSB2018_FFN_NORM,
        DSB2018_RECALIBRATION,
    )
}
