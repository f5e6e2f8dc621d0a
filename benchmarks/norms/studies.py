"""The norm studies: the runs that each one compares, and the changes of each run to the config of its benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Base:
    """A dataset and the LayerNorm detector that is trained on it from scratch.

    Attributes:
        name: Also the folder of its runs, and of its data below data/.
        config: Relative to the repository.
        metric: 'bbox' or 'segm', the AP of its tables.
        iterations: Length of a run.
        validations: How many a run has.
        images: Training images that the statistics are recalibrated on.
        setting: In words.
    """

    name: str
    config: Path
    metric: str
    iterations: int
    validations: int
    images: int
    setting: str


@dataclass(frozen=True)
class Run:
    """One line of a table, trained once per seed; studies of one dataset share runs by name.

    Attributes:
        name: Also its folder.
        label: Its name in tables.
        changes: Merged into the base config one after the other, as mmengine merges dicts; lists are replaced.
        setting: The setting that it shares with its control and not with the base.
        control: The run that it is compared with, seed by seed.
    """

    name: str
    label: str
    changes: tuple[dict, ...] = ()
    setting: str = ''
    control: str = 'ln'


@dataclass(frozen=True)
class Recalibration:
    """A trained run with the statistics of ``num_images`` training images; 0 is the run as it was trained.

    ``passes`` cuts the recalibration short; None goes on until nothing changes. ``pipeline``: see
    ``RecalibrateFuseHook``.
    """

    run: Run
    num_images: int
    passes: int | None = None
    pipeline: str = 'test'

    @property
    def name(self) -> str:
        how = f'{self.num_images}' + '-train' * (self.pipeline == 'train') + (f'x{self.passes}' if self.passes else '')
        return f'{self.run.name}@{how}'

    @property
    def label(self) -> str:
        if not self.num_images:
            return 'as trained'
        cut = f', cut short after pass {self.passes}' if self.passes else ''
        return f'{self.num_images} images' + ' as in training' * (self.pipeline == 'train') + cut

    @property
    def setting(self) -> str:
        return ', '.join(filter(None, [self.run.label, self.run.setting]))

    @property
    def control(self) -> str:
        return f'{self.run.name}@0'


@dataclass(frozen=True)
class Study:
    """Runs that answer one question; with recalibrations, these are the rows of the table."""

    name: str
    base: Base
    question: str
    runs: tuple[Run, ...]
    recalibrations: tuple[Recalibration, ...] = ()


BCCD = Base(
    'bccd',
    Path('benchmarks/bccd/faster_rcnn_swin_small.py'),
    'bbox',
    800,
    5,
    100,
    'BCCD: 292 training, 72 validation images at 320x240; Faster R-CNN, Swin-32x2222, 800 iterations of 4 images',
)
DSB2018 = Base(
    'dsb2018',
    Path('benchmarks/dsb2018/mask_rcnn_swin_small.py'),
    'segm',
    500,
    1,
    # A validation image is four times as large as a training crop, and so is one to recalibrate on.
    50,
    'DSB2018: 531 training images in crops of 256x256, 133 validation images at 512x512; Mask R-CNN, Swin-32x2222, '
    '500 iterations of 4 images',
)


def lasting(iterations: int, validations: int) -> dict:
    """The schedule of the base configs, of another length."""
    warmup = dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=100)
    decay = dict(type='CosineAnnealingLR', by_epoch=False, begin=100, end=iterations, eta_min=5e-6)
    return dict(
        max_iters=iterations,
        train_cfg=dict(max_iters=iterations, val_interval=iterations // validations),
        param_scheduler=[warmup, dict(decay, T_max=iterations - 100)],
        default_hooks=dict(checkpoint=dict(interval=iterations // 5, max_keep_ckpts=1)),
        custom_imports=dict(imports=['slab_det', 'benchmarks.norms.no_eta']),
        # LayerNorm; the other norms bring this hook with their own.
        custom_hooks=[STOP_AT_NAN],
    )


# A diverged run ends at once, as failed, and not an hour later with AP 0.
STOP_AT_NAN = dict(type='CheckInvalidLossHook', interval=10)


class Norms:
    """The changes that put a norm in every place of a backbone, with its hooks and the end without norms."""

    def __init__(self, base: Base) -> None:
        self.base = base

    def norm(self, cfg: dict, *hooks: dict, **backbone: object) -> dict:
        end = dict(type='RecalibrateFuseHook', num_images=self.base.images, pipeline='test')
        return dict(model=dict(backbone=dict(norm_cfg=cfg, **backbone)), custom_hooks=[STOP_AT_NAN, *hooks, end])

    def token_bn(self, **backbone: object) -> dict:
        return self.norm(dict(type='TokenBN'), **backbone)

    def prepbn(self, *hooks: dict, decay: str = 'linear', total: float = 0.8, **backbone: object) -> dict:
        progress = dict(type='ProgressiveNormHook', decay=decay, total=total, unit='fraction')
        return self.norm(dict(type='PRepBN'), progress, *hooks, **backbone)

    def moving(self, **cfg: object) -> dict:
        """UN, MABN or PowerNorm, with a warm-up of a tenth of the run, so that they differ only in their averages."""
        return self.norm(dict(**cfg, warmup_iters=self.base.iterations // 10), dict(type='UnifiedNormHook'))


def in_setting(name: str, setting: str, changes: tuple[dict, ...], *runs: tuple[str, str, dict]) -> tuple[Run, ...]:
    """LayerNorm, which is the control, and other runs (name, label, change) in another setting."""
    control = f'{name}_ln'
    return (
        Run(control, 'LayerNorm', changes, setting, control),
        *(Run(f'{name}_{run}', label, (*changes, change), setting, control) for run, label, change in runs),
    )


def paramwise(key: str, **multipliers: float) -> dict:
    """Other multipliers for the parameters whose name contains ``key``; the longest key of a name counts."""
    return dict(optim_wrapper=dict(paramwise_cfg=dict(custom_keys={key: multipliers})))


UN = dict(type='UN', window_size=4)
OUT_LN = dict(out_norm_cfg=dict(type='LN'))
LN_RUN = Run('ln', 'LayerNorm')


def norm_runs(base: Base) -> dict[str, Run]:
    """The runs that both datasets have, by name."""
    make = Norms(base)
    runs = (
        LN_RUN,
        Run('token_bn', 'TokenBN', (make.token_bn(),)),
        Run('bn_ffnbn', 'BN+FFNBN', (make.token_bn(ffn_norm='pre_act'),)),
        # Table 7 of SLAB: BN, then with progression, then with eta.
        Run('progressive_bn', 'PRepBN, linear, eta fixed at 0', (make.prepbn(dict(type='NoEtaHook')),)),
        Run('repbn', 'RepBN, no progression', (make.norm(dict(type='RepBN')),)),
        *(Run(f'prepbn_t{total}', f'PRepBN, T = {total}', (make.prepbn(total=total),)) for total in (0.2, 0.5, 1.0)),
        Run('prepbn_t0.0', 'PRepBN, T = 0 (RepBN)', (make.prepbn(total=0.0),)),
        Run('prepbn', 'PRepBN, linear', (make.prepbn(),)),
        Run('prepbn_cosine', 'PRepBN, cosine', (make.prepbn(decay='cosine'),)),
        Run('prepbn_step', 'PRepBN, step', (make.prepbn(decay='step'),)),
        Run('un', 'UN, warm-up 10 %', (make.moving(**UN),)),
        Run('un_unfiltered', 'UN, warm-up 10 %, no filtration', (make.moving(**UN, filter_outliers=False),)),
        Run('mabn', 'MABN, warm-up 10 %', (make.moving(type='MABN'),)),
        Run('powernorm', 'PowerNorm, warm-up 10 %', (make.moving(type='PowerNorm'),)),
        Run('ln_ffn_norm', 'LayerNorm, one more in each FFN', (dict(model=dict(backbone=dict(ffn_norm='pre_act'))),)),
        Run('prepbn_ffn_norm', 'PRepBN, one more in each FFN', (make.prepbn(ffn_norm='pre_act'),)),
        Run('prepbn_out_norm_ln', 'PRepBN, output norms LayerNorm', (make.prepbn(**OUT_LN),)),
        Run('token_bn_out_norm_ln', 'TokenBN, output norms LayerNorm', (make.token_bn(**OUT_LN),)),
        Run('prepbn_drop_path_0.1', 'PRepBN, drop-path 0.1', (make.prepbn(drop_path_rate=0.1),)),
        Run('prepbn_weight_decay', 'PRepBN, weight decay of norms', (make.prepbn(), paramwise('norm', decay_mult=1.0))),
        Run(
            'prepbn_eta_lr_10',
            'PRepBN, learning rate of eta x10',
            (make.prepbn(), paramwise('repbn.eta', lr_mult=10.0, decay_mult=0.0)),
        ),
    )
    return {run.name: run for run in runs}


def select(runs: dict[str, Run], names: str) -> tuple[Run, ...]:
    """Runs by name, in order."""
    return tuple(runs[name] for name in names.split())


ON_BCCD, ON_DSB2018 = norm_runs(BCCD), norm_runs(DSB2018)
BCCD_NORMS = Norms(BCCD)
PREPBN, TOKEN_BN = ('prepbn', 'PRepBN, linear'), ('token_bn', 'TokenBN')
# On the maps of 80x64 and 40x32: half of the rows, and all of them, as in the quick start.
SLA = dict(attention=('sla', 'sla', 'softmax', 'softmax'), window_sizes=(32, 32, 7, 7))
SLA_RUNS = in_setting('sla', 'SLA attention', (dict(model=dict(backbone=SLA)),), (*PREPBN, BCCD_NORMS.prepbn()))
DROP_PATH = in_setting(
    'drop_path_0.3', 'drop-path 0.3', (dict(model=dict(backbone=dict(drop_path_rate=0.3))),),
    (*PREPBN, BCCD_NORMS.prepbn()),
)  # fmt: skip
DEEP = dict(
    model=dict(
        backbone=dict(embed_dims=24, depths=(2, 2, 12, 2)), neck=dict(in_channels=[24 * 2**stage for stage in range(4)])
    ),
    optim_wrapper=dict(optimizer=dict(lr=2e-3)),
)
# The same learning rate. So many iterations take about as long as 800 of 4 images.
BATCH_1 = (lasting(2000, 5), dict(train_dataloader=dict(batch_size=1)))
# Neither dataset pads as COCO does: images of several sizes share a batch here, and are padded to the largest.
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
PADDED = in_setting(
    'padded', 'images of several sizes, padded', (SEVERAL_SIZES,),
    (*TOKEN_BN, BCCD_NORMS.token_bn()), (*PREPBN, BCCD_NORMS.prepbn()),
)  # fmt: skip
LONG = in_setting(
    'long', 'twice the iterations', (lasting(2 * DSB2018.iterations, 1),), (*PREPBN, Norms(DSB2018).prepbn())
)


def recalibrations(runs: tuple[Run, ...], *ways: tuple) -> tuple[Recalibration, ...]:
    """Every run in every way: (num_images, passes, pipeline)."""
    return tuple(Recalibration(run, *way) for run in runs for way in ways)


STUDIES = {
    study.name: study
    for study in (
        Study(
            'bccd-norms',
            BCCD,
            'Which norm keeps the AP of LayerNorm?',
            select(
                ON_BCCD,
                'ln token_bn bn_ffnbn progressive_bn repbn prepbn prepbn_cosine prepbn_step un un_unfiltered '
                'mabn powernorm',
            ),
        ),
        Study(
            'bccd-attention',
            BCCD,
            'Does the answer change with simplified linear attention?',
            (*select(ON_BCCD, 'ln prepbn'), *SLA_RUNS),
        ),
        Study(
            'bccd-choices',
            BCCD,
            'What brings PRepBN level with LayerNorm?',
            (*select(ON_BCCD, 'ln prepbn'), *DROP_PATH),
        ),
        Study(
            'bccd-hard',
            BCCD,
            'Where does BatchNorm fail, and does PRepBN fail with it?',
            (
                *DROP_PATH,
                *in_setting(
                    'deep12_lr4',
                    'depths 2,2,12,2, embed 24, learning rate 2e-3',
                    (DEEP,),
                    (*TOKEN_BN, BCCD_NORMS.token_bn()),
                ),
                *in_setting('batch1', 'batch 1, 2000 iterations', BATCH_1, (*TOKEN_BN, BCCD_NORMS.token_bn())),
            ),
        ),
        Study('bccd-padding', BCCD, 'What does padding in the statistics cost?', PADDED),
        Study(
            'bccd-pipeline',
            BCCD,
            'Statistics of images as inference sees them, or as training did?',
            PADDED[1:],
            recalibrations(PADDED[1:], (0,), (100,), (100, None, 'train')),
        ),
        Study(
            'bccd-recalibration',
            BCCD,
            'What does the recalibration change, and how many images does it need?',
            (ON_BCCD['prepbn'], DROP_PATH[1]),
            recalibrations(
                (ON_BCCD['prepbn'], DROP_PATH[1]), (0,), (10,), (100,), (292,), (100, None, 'train')
            ),
        ),
        Study(
            'dsb2018-norms',
            DSB2018,
            'Which norm keeps the AP of LayerNorm where images differ?',
            select(
                ON_DSB2018,
                'ln token_bn bn_ffnbn progressive_bn prepbn_t0.0 prepbn un un_unfiltered mabn powernorm',
            ),
        ),
        Study(
            'dsb2018-choices',
            DSB2018,
            'What brings PRepBN level with LayerNorm where images differ?',
            (
                *select(
                    ON_DSB2018,
                    'ln prepbn_t0.0 prepbn_t0.2 prepbn_t0.5 prepbn prepbn_t1.0 prepbn_out_norm_ln token_bn_out_norm_ln '
                    'prepbn_ffn_norm prepbn_drop_path_0.1 prepbn_weight_decay prepbn_eta_lr_10',
                ),
                *LONG,
            ),
        ),
        Study(
            'dsb2018-ffn-norm',
            DSB2018,
            'Is it BatchNorm that gains by a norm in each FFN?',
            select(ON_DSB2018, 'ln ln_ffn_norm bn_ffnbn prepbn_ffn_norm'),
        ),
        Study(
            'dsb2018-recalibration',
            DSB2018,
            'What does the recalibration change where images differ?',
            select(ON_DSB2018, 'token_bn bn_ffnbn prepbn'),
            recalibrations(
                select(ON_DSB2018, 'token_bn bn_ffnbn prepbn'),
                (0,), (50, 1), (50, 8), (50,), (10,), (200,), (200, None, 'train'),
            ),
        ),
    )
}  # fmt: skip
