"""Trains a small detector with each norm, from scratch, and adds the AP to the results and their table.

    python -m benchmarks.norms.run bccd-norms --data-root data/bccd --seeds 0 1 2
    python -m benchmarks.norms.run dsb2018-norms --only ln token_bn prepbn
    python -m benchmarks.norms.run bccd-norms --iterations 2000 --only ln bn_ffnbn
    python -m benchmarks.norms.run bccd-norms --table-only

A run is one call of tools/train.py, in WORK_DIR/STUDY/RUN/seedN; a run that was interrupted goes on, one that is done
is not trained again. Results are added to benchmarks/results/norms_STUDY.json, and the table goes below the line
`<!-- norms STUDY -->` of benchmarks/README.md.
"""

import slab_det  # noqa: F401 (before mmdet: registers everything)

# isort: split

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from mmengine.config import Config

from benchmarks.norms.table import replace_table, study_table
from benchmarks.results import FOLDER, ROOT, Results
from slab_det.measure.report_file import AP_KINDS, ap_from_metrics, read_report

PAGE = Path('benchmarks/README.md')
# A diverged run fails at once, instead of ending an hour later with AP 0.
STOP_AT_NAN = dict(type='mmdet.CheckInvalidLossHook', interval=10)
PROGRESS = dict(type='ProgressiveNormHook', total=0.8, unit='fraction')
# Label in the table, changes of the backbone, and hooks.
RUNS = {
    'ln': ('LayerNorm', dict(norm_cfg=dict(type='LN')), []),
    'ln_ffn': ('LayerNorm, one more in each FFN', dict(norm_cfg=dict(type='LN'), ffn_norm='pre_act'), []),
    'token_bn': ('TokenBN', dict(norm_cfg=dict(type='TokenBN')), []),
    'bn_ffnbn': ('BN+FFNBN', dict(norm_cfg=dict(type='TokenBN'), ffn_norm='pre_act'), []),
    'repbn': ('RepBN, no progression', dict(norm_cfg=dict(type='RepBN')), []),
    'prepbn': ('PRepBN, linear', dict(norm_cfg=dict(type='PRepBN')), [PROGRESS]),
    'prepbn_ffn': ('PRepBN, one more in each FFN', dict(norm_cfg=dict(type='PRepBN'), ffn_norm='pre_act'), [PROGRESS]),
    'prepbn_cosine': ('PRepBN, cosine', dict(norm_cfg=dict(type='PRepBN')), [dict(PROGRESS, decay='cosine')]),
    'prepbn_step': ('PRepBN, step', dict(norm_cfg=dict(type='PRepBN')), [dict(PROGRESS, decay='step')]),
    'un': ('UN, warm-up 10 %', dict(norm_cfg=dict(type='UN', window_size=4)), []),
    'mabn': ('MABN, warm-up 10 %', dict(norm_cfg=dict(type='MABN')), []),
    'powernorm': ('PowerNorm, warm-up 10 %', dict(norm_cfg=dict(type='PowerNorm')), []),
}
# With FFNs as thin as absorption leaves them.
RUNS |= {
    f'{name}_{ratio}': (f'{RUNS[name][0]}, mlp_ratio {ratio}', dict(RUNS[name][1], mlp_ratio=ratio), [])
    for name in ('ln', 'bn_ffnbn')
    for ratio in (1.5, 2.5)
}


@dataclass(frozen=True)
class Study:
    """A dataset and the LayerNorm detector that is trained on it from scratch.

    Attributes:
        config: Relative to the repository.
        metric: 'bbox' or 'segm', the AP of its table.
        iterations: Length of a run.
        images: Number of training images for the recalibration.
        setting: Data and model in words.
    """

    config: Path
    metric: str
    iterations: int
    images: int
    setting: str


STUDIES = {
    'bccd-norms': Study(
        Path('benchmarks/bccd/faster_rcnn_swin_small.py'),
        'bbox',
        800,
        100,
        'BCCD: 292 training, 72 validation images at 320x240; Faster R-CNN, Swin-32x2222',
    ),
    'dsb2018-norms': Study(
        Path('benchmarks/dsb2018/mask_rcnn_swin_small.py'),
        'segm',
        500,
        # A validation image is four times as large as a training crop, and so is one to recalibrate on.
        50,
        'DSB2018: 531 training images in crops of 256x256, 133 validation images at 512x512; Mask R-CNN, Swin-32x2222',
    ),
}


def run_config(study: Study, name: str, seed: int) -> Config:
    """The study's config with the norm of a run and a seed."""
    config = Config.fromfile(ROOT / study.config)
    _, backbone, hooks = RUNS[name]
    if name in ('un', 'mabn', 'powernorm'):
        # The same warm-up for all three, so that they differ only in their averages.
        backbone = dict(norm_cfg=dict(backbone['norm_cfg'], warmup_iters=study.iterations // 10))
    if backbone['norm_cfg']['type'] != 'LN':
        hooks = [*hooks, dict(type='RecalibrateFuseHook', num_images=study.images, pipeline='test')]
    warmup = dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=min(100, study.iterations // 2))
    decay = dict(type='CosineAnnealingLR', by_epoch=False, begin=warmup['end'], end=study.iterations, eta_min=5e-6)
    config.merge_from_dict(
        dict(
            model=dict(backbone=backbone),
            train_cfg=dict(max_iters=study.iterations, val_interval=study.iterations),
            param_scheduler=[warmup, dict(decay, T_max=study.iterations - warmup['end'])],
            default_hooks=dict(checkpoint=dict(interval=max(1, study.iterations // 5), max_keep_ckpts=1)),
            custom_hooks=[STOP_AT_NAN, *hooks],
            randomness=dict(seed=seed),
        )
    )
    return config


def call(command: list[str]) -> None:
    """Prints and runs a command."""
    print('$', shlex.join(command), flush=True)
    subprocess.run(command, check=True)


def train(config: Config, folder: Path, data_root: str) -> None:
    """Trains a config in a folder, unless that is done; an interrupted training goes on.

    Raises:
        subprocess.CalledProcessError: If the training fails.
    """
    if not (folder / 'done').exists():
        file = folder / 'merged' / 'config.py'
        file.parent.mkdir(parents=True, exist_ok=True)
        config.dump(file)
        arguments = [str(file), '--work-dir', str(folder), '--data-root', data_root, '--resume']
        call([sys.executable, 'tools/train.py', *arguments])
        (folder / 'done').touch()


def read_ap(folder: Path, metric: str) -> dict:
    """The last AP of a training in a folder, 'bbox' or 'segm', and that of the recalibrated model if there is one."""
    logs = ''.join(file.read_text() for file in sorted(folder.glob('*/vis_data/scalars.json')))
    # The keys of the recalibrated model only end like this one.
    key = f'coco/{metric}_mAP'
    all_ap = ap_from_metrics([values for values in map(json.loads, logs.splitlines()) if key in values][-1])
    result = dict(AP=all_ap[metric]['AP'], all_ap=all_ap)
    if (folder / 'report.json').exists():
        entry = read_report(folder / 'report.json')[0]
        before = dict(AP_before_recalibration=result['AP'], recalibration=entry.recalibration)
        result = dict(AP=entry.ap[metric]['AP'], all_ap=entry.ap, **before)
    return result


def publish(study: str, page: Path, folder: Path) -> None:
    """Prints the table of a study and writes it below its mark on the page."""
    results = Results(folder / f'norms_{study}.json')
    table = study_table(results.rows, results.setting['metric'])
    print(table)
    replace_table(page, f'norms {study}', table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('study', choices=STUDIES)
    parser.add_argument('--data-root', help='default: data/DATASET')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--only', nargs='+', choices=RUNS, help='only these rows')
    parser.add_argument('--iterations', type=int, help="instead of the study's; they stand in the name of the results")
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/norms'))
    parser.add_argument('--table-only', action='store_true', help='run nothing: write the table again')
    args = parser.parse_args()
    os.chdir(ROOT)
    os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    study, title, failed = STUDIES[args.study], args.study, []
    if args.iterations:
        study, title = replace(study, iterations=args.iterations), f'{args.study}-{args.iterations}'
    text = f'{study.setting}, {study.iterations} iterations of 4 images'
    results = Results(FOLDER / f'norms_{title}.json', text=text, metric=AP_KINDS[study.metric])
    control = RUNS['ln'][0]
    for seed in [] if args.table_only else args.seeds:
        for name in args.only or RUNS:
            folder = args.work_dir / title / name / f'seed{seed}'
            try:
                data_root = args.data_root or f'data/{args.study.partition("-")[0]}'
                train(run_config(study, name, seed), folder, data_root)
            except subprocess.CalledProcessError:
                # A run that fails does not stop the others.
                failed.append(f'{name} seed {seed} failed: call again to go on, output above')
                continue
            label, result = RUNS[name][0], read_ap(folder, study.metric)
            results.add(dict(name=label, seed=seed) | ({} if label == control else dict(control=control)), result)
    publish(title, PAGE, FOLDER)
    if failed:
        raise SystemExit('\n'.join(failed))


if __name__ == '__main__':
    main()
