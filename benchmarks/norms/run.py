"""Trains a small detector with each norm, from scratch, and adds their AP to results and table.

    python -m benchmarks.norms.run bccd-norms --data-root data/bccd --seeds 0 1 2
    python -m benchmarks.norms.run dsb2018-norms --only ln token_bn prepbn
    python -m benchmarks.norms.run bccd-norms --iterations 2000 --only ln bn_ffnbn
    python -m benchmarks.norms.run bccd-starts
    python -m benchmarks.norms.run bccd-norms --table-only

A run is one call of tools/train.py, in WORK_DIR/STUDY/RUN/seedN; a run that was interrupted goes on, one that is done
is not trained again. Results are added to benchmarks/results/norms_STUDY.json, and the table goes below the line
`<!-- norms STUDY -->` of docs/results.md.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import cv2
from mmengine.config import Config
from pycocotools.coco import COCO

from benchmarks.norms.table import markdown, replace_table
from slab_det.measure.environment import describe_environment
from slab_det.measure.report import AP_KINDS, ap_from_metrics, read_report

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path('docs/results.md')
CLASSIFIER, CLASSIFIER_ITERATIONS = Path('benchmarks/bccd/classifier_swin_small.py'), 600
# A diverged run ends at once, as failed, and not an hour later with AP 0.
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
NORMS = tuple(RUNS)
# Where a detector starts from: the backbone of a classifier of cells, or of a detector of another data set.
STARTS = {
    'scratch': 'from scratch',
    'ln': 'from a LayerNorm classifier',
    'prepbn': 'from a PRepBN classifier',
    'other': 'from a LayerNorm detector of the other data set',
}
RUNS |= {
    f'ln_from_{start}': (f'LayerNorm, {STARTS[start]}', dict(norm_cfg=dict(type='LN')), [])
    for start in ('scratch', 'ln', 'other')
} | {
    f'prepbn_{total}_from_{start}': (
        f'PRepBN, T = {total}, {label}',
        dict(norm_cfg=dict(type='PRepBN')),
        [dict(PROGRESS, total=total)],
    )
    for start, label in STARTS.items()
    for total in (0, 0.2, 0.8)
    # Its gamma is 0 already, but in the output norms, which a classifier has not.
    if (start, total) != ('prepbn', 0.2)
}


@dataclass(frozen=True)
class Study:
    """A dataset and the LayerNorm detector that is trained on it from scratch.

    Attributes:
        config: Relative to the repository.
        metric: 'bbox' or 'segm', the AP of its table.
        iterations: Length of a run.
        images: Training images that the statistics are recalibrated on.
        setting: In words.
        runs: What it consists of.
        other: The study whose LayerNorm detector a run starts from; its data lie beside those of this study.
    """

    config: Path
    metric: str
    iterations: int
    images: int
    setting: str
    runs: tuple[str, ...] = NORMS
    other: str = ''


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
    'bccd-starts': Study(
        Path('benchmarks/bccd/faster_rcnn_swin_small.py'),
        'bbox',
        250,
        100,
        'BCCD: 292 training, 72 validation images at 320x240; Faster R-CNN, Swin-32x2222',
        tuple(name for name in RUNS if '_from_' in name),
        'dsb2018-norms',
    ),
    'dsb2018-starts': Study(
        Path('benchmarks/dsb2018/mask_rcnn_swin_small.py'),
        'segm',
        250,
        50,
        'DSB2018: 531 training images in crops of 256x256, 133 validation images at 512x512; Mask R-CNN, Swin-32x2222',
        tuple(name for name in RUNS if name.endswith(('_from_scratch', '_from_other'))),
        'bccd-norms',
    ),
}


def run_config(study: Study, name: str, seed: int, start: Path | None = None) -> Config:
    """The study's config with the norm of a run, a seed, and the checkpoint that the backbone starts from."""
    config = Config.fromfile(ROOT / study.config)
    _, backbone, hooks = RUNS[name]
    if start:
        backbone = dict(backbone, init_cfg=dict(type='Pretrained', checkpoint=str(start.resolve())))
    if name in ('un', 'mabn', 'powernorm'):
        # One warm-up for all three, so that only their averages differ.
        backbone = dict(norm_cfg=dict(backbone['norm_cfg'], warmup_iters=study.iterations // 10))
    if backbone['norm_cfg']['type'] != 'LN':
        hooks = [*hooks, dict(type='RecalibrateFuseHook', num_images=study.images, pipeline='test')]
    warmup = dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=min(100, study.iterations // 2))
    decay = dict(type='CosineAnnealingLR', by_epoch=False, begin=warmup['end'], end=study.iterations, eta_min=5e-6)
    config.merge_from_dict(
        dict(
            model=dict(backbone=backbone),
            max_iters=study.iterations,
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


def train(study: Study, name: str, seed: int, folder: Path, data_root: str) -> dict:
    """Trains a run if it has not ended yet, and returns its AP.

    Raises:
        subprocess.CalledProcessError: If the training fails.
    """
    report, key = folder / 'report.json', f'coco/{study.metric}_mAP'
    if not (folder / 'done').exists():
        _, _, start = name.partition('_from_')
        checkpoint = None
        if start in ('ln', 'prepbn'):
            checkpoint = train_classifier(start, seed, folder.parents[1], data_root)
        elif start == 'other':
            checkpoint = train_other(study.other, seed, folder.parents[2], data_root)
        run_tool(run_config(study, name, seed, checkpoint), folder, data_root)
    logs = ''.join(file.read_text() for file in sorted(folder.glob('*/vis_data/scalars.json')))
    # Not the line of the recalibrated model, whose keys only end like these.
    all_ap = ap_from_metrics([values for values in map(json.loads, logs.splitlines()) if key in values][-1])
    result = dict(ap=all_ap[study.metric]['AP'], all_ap=all_ap)
    if report.exists():
        entry = read_report(report)[0]
        before = dict(ap_before_recalibration=result['ap'], recalibration=entry.recalibration)
        result = dict(ap=entry.ap[study.metric]['AP'], all_ap=entry.ap, **before)
    return result


def run_tool(config: Config, folder: Path, data_root: str | Path) -> None:
    """Trains, or goes on training, in a folder."""
    path = folder / 'merged' / 'config.py'
    path.parent.mkdir(parents=True, exist_ok=True)
    config.dump(path)
    arguments = [str(path), '--work-dir', str(folder), '--data-root', str(data_root), '--resume']
    call([sys.executable, 'tools/train.py', *arguments])
    (folder / 'done').touch()


def train_classifier(norm: str, seed: int, study: Path, data_root: str) -> Path:
    """Trains a classifier of cells if it has not ended yet, and returns its checkpoint; gamma ends at 0."""
    folder, cells = study / f'classifier_{norm}' / f'seed{seed}', study / 'cells'
    if not (folder / 'done').exists():
        cut_cells(Path(data_root), cells)
        classifier = Study(CLASSIFIER, '', CLASSIFIER_ITERATIONS, 100, '')
        run_tool(run_config(classifier, norm, seed), folder, cells)
    return folder / f'iter_{CLASSIFIER_ITERATIONS}.pth'


def train_other(name: str, seed: int, work_dir: Path, data_root: str) -> Path:
    """Trains the LayerNorm detector of another study if it has not ended yet, and returns its checkpoint."""
    study, folder = STUDIES[name], work_dir / name / 'ln' / f'seed{seed}'
    train(study, 'ln', seed, folder, str(Path(data_root).parent / name.partition('-')[0]))
    return folder / f'iter_{study.iterations}.pth'


def cut_cells(data_root: Path, out: Path, limit: int = 300) -> None:
    """64x64 pixels around the centre of each cell, at half size as the detector sees them: OUT/SPLIT/CLASS/N.png.

    At most `limit` per class, of both splits apart; what leaves the image is grey.
    """
    for split in ('train', 'val'):
        coco = COCO(data_root / f'annotations/instances_{split}.json')
        for category in coco.loadCats(coco.getCatIds()):
            folder = out / split / category['name']
            folder.mkdir(parents=True, exist_ok=True)
            annotations = coco.loadAnns(coco.getAnnIds(catIds=[category['id']]))
            for annotation in random.Random(0).sample(annotations, min(limit, len(annotations))):
                path = data_root / 'images' / split / coco.imgs[annotation['image_id']]['file_name']
                x, y, width, height = annotation['bbox']
                centre = (x + width / 2, y + height / 2)
                image = cv2.copyMakeBorder(cv2.imread(str(path)), 64, 64, 64, 64, cv2.BORDER_CONSTANT, value=[127] * 3)
                cell = cv2.getRectSubPix(image, (128, 128), (centre[0] + 64, centre[1] + 64))
                cell = cv2.resize(cell, (64, 64), interpolation=cv2.INTER_AREA)
                cv2.imwrite(str(folder / f'{annotation["id"]}.png'), cell)


def add_result(file: Path, study: Study, name: str, seed: int, result: dict) -> None:
    """Adds one run with one seed to the stored results."""
    if file.exists():
        results = json.loads(file.read_text())
    else:
        setting = f'{study.setting}, {study.iterations} iterations of 4 images'
        results = dict(setting=setting, metric=AP_KINDS[study.metric], runs={}, environments=[])
    entry = results['runs'].setdefault(name, dict(seeds={}))
    entry |= dict(label=RUNS[name][0], control='ln_from_scratch' if '_from_' in name else 'ln')
    entry['seeds'][str(seed)] = result
    environment = describe_environment()
    if environment not in results.setdefault('environments', []):
        results['environments'].append(environment)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + '\n')


def publish(study: str, page: Path = PAGE, folder: Path = Path('benchmarks/results')) -> None:
    """Prints the table of a study and writes it below its mark on the page."""
    table = markdown(json.loads((folder / f'norms_{study}.json').read_text()))
    print(table)
    replace_table(page, f'norms {study}', table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('study', choices=STUDIES)
    parser.add_argument('--data-root', help='default: data/DATASET')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--only', nargs='+', choices=RUNS, help='only these rows')
    parser.add_argument('--iterations', type=int, help='instead of those of the study; the name of the results says so')
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/norms'))
    parser.add_argument('--table-only', action='store_true', help='run nothing: write the table again')
    args = parser.parse_args()
    os.chdir(ROOT)
    os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    study, name_of_study, failed = STUDIES[args.study], args.study, []
    if args.iterations:
        study, name_of_study = replace(study, iterations=args.iterations), f'{args.study}-{args.iterations}'
    for seed in [] if args.table_only else args.seeds:
        for name in args.only or study.runs:
            folder = args.work_dir / name_of_study / name / f'seed{seed}'
            try:
                result = train(study, name, seed, folder, args.data_root or f'data/{args.study.partition("-")[0]}')
            except subprocess.CalledProcessError:
                # A run that fails does not stop the others.
                failed.append(f'{name} seed {seed} failed: call again to go on, output above')
                continue
            add_result(Path(f'benchmarks/results/norms_{name_of_study}.json'), study, name, seed, result)
    publish(name_of_study)
    if failed:
        raise SystemExit('\n'.join(failed))


if __name__ == '__main__':
    main()
