"""Absorbs the norms of trained LayerNorm detectors and tunes them: AP beside the teachers, which are trained first.

    python -m benchmarks.absorb.run bccd --data-root data/bccd --seeds 0 1 2
    python -m benchmarks.absorb.run dsb2018 --data-root data/dsb2018 --iterations 2000
    python -m benchmarks.absorb.run hard --data-root data/hard --iterations 1600 --ways default 'channels 0.5'

The teachers of `hard` are those of benchmarks/hard/train.py. Corrupted images need imagecorruptions, which
requirements/test.txt has.

A row, one way with one seed, is measured once and added to benchmarks/results/absorb_DATASET.json; what is there is
not measured again. Rows 'fewest norms' are of keep='auto', which 25195966 had last. Trainings are calls of
tools/train.py in WORK_DIR, and go on where they were interrupted.
"""

import slab_det  # before mmdet: registers everything

# isort: split

import argparse
import copy
import fnmatch
import os
import subprocess
import sys
from functools import cache, partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from mmcv.transforms import BaseTransform
from mmdet.registry import TRANSFORMS
from mmengine.config import Config
from torch import nn

from benchmarks.absorb.controls import with_affine_ffns, with_scales_for_norms, with_thin_blocks
from benchmarks.hard.train import schedule
from benchmarks.results import FOLDER, ROOT, Results
from slab_det import runtime
from slab_det.checkpoints import build_detector
from slab_det.conversion import write_tune_config
from slab_det.fusion import save_fused
from slab_det.measure.evaluate import evaluate
from slab_det.preflight import set_data_root
from slab_det.recalibration import recalibration_dataloader

CONFIGS = {
    'hard': 'benchmarks/hard/mask_rcnn_swin.py',
    'hard_320': 'benchmarks/hard/mask_rcnn_swin_320.py',
    'bccd': 'benchmarks/bccd/faster_rcnn_swin_small.py',
    'dsb2018': 'benchmarks/dsb2018/mask_rcnn_swin_small.py',
}
METRICS = {'bccd': 'bbox', 'dsb2018': 'segm', 'hard': 'segm', 'hard_320': 'segm'}
FINETUNE = ROOT / 'benchmarks/finetune/schedule.py'
TUNE = ROOT / 'configs/_base_/schedules/tune_absorbed.py'
IN_PROCESS = dict(num_workers=0, persistent_workers=False)
# Shares of the multiply-adds that stay, of detectors that keep their norms.
CHANNELS = (0.7, 0.5, 0.33)
CORRUPTIONS = ('defocus_blur', 'gaussian_noise', 'contrast', 'jpeg_compression')
SEVERITIES = (1, 3, 5)
# Iterations from scratch.
SCRATCH = 250
# What is measured by default.
WAYS = ('all gone', 'control', 'tuned', 'tuned without labels', 'tuned on a folder', 'for int8')
WAYS += tuple(f'channels {share}' for share in CHANNELS)


# This file may also be run by a script that imported it.
@TRANSFORMS.register_module(force=True)
class CorruptImage(BaseTransform):
    """One of the corruptions of Hendrycks and Dietterich (ICLR 2019).

    Args:
        name: One of ``CORRUPTIONS``.
        severity: From 1 to 5.
    """

    def __init__(self, name: str, severity: int) -> None:
        self.name, self.severity = name, severity

    def transform(self, results: dict) -> dict:
        """Corrupts the image; the same image always gets the same noise."""
        from imagecorruptions import corrupt

        np.random.seed(results['img_id'] % 2**32)
        return results | dict(img=corrupt(results['img'], corruption_name=self.name, severity=self.severity))


def corrupted(cfg: Config, name: str, severity: int) -> Config:
    """A copy of a config whose validation images are corrupted."""
    cfg = copy.deepcopy(cfg)
    cfg.val_dataloader.dataset.pipeline.insert(1, dict(type='mmdet.CorruptImage', name=name, severity=severity))
    return cfg


def train(config: str | Path, work_dir: Path, data_root: str | None, *options: str) -> Path:
    """Trains by tools/train.py and returns the last checkpoint; without ``data_root`` on pictures alone."""
    if not (work_dir / 'done').exists():
        kinds = ('train', 'val') if data_root else ('train',)
        loaders = [f'{kind}_dataloader.{key}={value}' for kind in kinds for key, value in IN_PROCESS.items()]
        command = [sys.executable, ROOT / 'tools/train.py', config, '--work-dir', work_dir]
        command += ['--data-root', data_root] if data_root else []
        command += ['--resume'] if (work_dir / 'last_checkpoint').exists() else []
        command += ['--cfg-options', *loaders, *options]
        work_dir.mkdir(parents=True, exist_ok=True)
        with open(work_dir / 'log.txt', 'a') as log:
            environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
            subprocess.run([*map(str, command)], check=True, stdout=log, stderr=log, env=environment)
        (work_dir / 'done').touch()
    return Path((work_dir / 'last_checkpoint').read_text().strip())


def find_teacher(args: argparse.Namespace, seed: int, folder: Path) -> tuple[Config, Path]:
    """Config and checkpoint of the teacher of a seed, which is trained unless that is done."""
    if args.dataset.startswith('hard'):
        folder = args.teachers / f'ln-{args.width}-{args.iterations}' / f'seed{seed}' / 'detector'
        if not (folder / 'done').exists():
            raise SystemExit(f'{folder} has no trained teacher: run python -m benchmarks.hard.train first')
        cfg = Config.fromfile(folder / 'merged' / 'config.py')
        set_data_root(cfg, args.data_root)
        return cfg, Path((folder / 'last_checkpoint').read_text().strip())
    cfg = Config.fromfile(ROOT / CONFIGS[args.dataset])
    set_data_root(cfg, args.data_root)
    end = args.iterations
    length = [f'train_cfg.max_iters={end}', f'train_cfg.val_interval={end}', f'param_scheduler.1.end={end}',
              f'param_scheduler.1.T_max={end - 100}', f'randomness.seed={seed}']  # fmt: skip
    return cfg, train(CONFIGS[args.dataset], folder / 'teacher', args.data_root, *length)


def measure_seed(args: argparse.Namespace, results: Results, seed: int, folder: Path) -> None:
    """Trains the teacher of a seed and measures every way that ``args`` ask for."""
    cfg, checkpoint = find_teacher(args, seed, folder)
    cfg.val_dataloader.update(IN_PROCESS)
    teacher = build_detector(cfg, str(checkpoint))
    images = recalibration_dataloader(cfg, args.num_images, 'test')
    shared = dict(work_dir=folder / 'absorbed', progress=False)

    def ap(model: nn.Module, config: Config = cfg) -> dict:
        values = evaluate(model, config)
        kind = METRICS[args.dataset]
        return dict(AP=values[kind]['AP'], **dict(box_AP=values['bbox']['AP']) if kind == 'segm' else {})

    def save(student: nn.Module, name: str) -> None:
        save_fused(student, cfg, folder / f'{name}.pth', teacher.dataset_meta)

    def measured(student: nn.Module) -> dict:
        report = student.absorption_report
        values = dict(**ap(student), retained=report.retained_ap)
        if len(report.kept) < len(report.norms):
            values |= dict(kept=[norm.norm for norm in report.kept])
        if report.multiply_adds:
            before, after = report.multiply_adds
            units = {unit.unit: (unit.kept, unit.channels) for unit in report.pruned}
            values |= dict(share=round(after / before, 4), channels=units)
        return values

    def absorbed(name: str = '', **options: object) -> dict:
        student = slab_det.absorb(teacher, images, **options, **shared)
        if name:
            save(student, name)
        return measured(student)

    @cache
    def student_of(way: str) -> nn.Module:
        """The teacher, or the student of a share of channels."""
        share = way.removeprefix('channels ')
        return teacher if way == 'teacher' else slab_det.absorb(teacher, images, channels=float(share), **shared)

    def tuned(name: str, start: str, *options: str, pictures: Path | None = None) -> dict:
        fused_config = folder / f'{start}_config.py'
        files = fused_config, folder / f'{start}.pth', checkpoint
        config = write_tune_config(cfg, *files, Config.fromfile(TUNE), pictures)
        last = train(config, folder / name, None if pictures else args.data_root, *options)
        return ap(build_detector(Config.fromfile(fused_config), str(last)))

    def control() -> dict:
        # The schedule without its hooks: they are for norms that can be fused.
        schedule = Config.fromfile(FINETUNE).to_dict()
        values = {key: schedule[key] for key in ('train_cfg', 'optim_wrapper', 'param_scheduler')}
        config = folder / 'control_config.py'
        Config({**cfg.to_dict(), **values, 'load_from': str(checkpoint)}).dump(config)
        last = train(config, folder / 'control', args.data_root, f'randomness.seed={seed}')
        return ap(build_detector(cfg, str(last)))

    def from_scratch(start: str) -> dict:
        """A student's layers, trained with labels and random weights for about the time of survey and fine-tune."""
        fused = Config.fromfile(folder / f'{start}_config.py')
        config = copy.deepcopy(cfg)
        config.model = fused.model
        config.merge_from_dict(schedule(SCRATCH, lr_end=8e-6))
        file = folder / f'{start}_scratch_config.py'
        config.dump(file)
        last = train(file, folder / f'{start}_scratch', args.data_root, f'randomness.seed={seed}')
        return ap(build_detector(fused, str(last)))

    no_labels = 'model.task_weight=0'
    ways = {
        'teacher': lambda: ap(teacher),
        'all gone': lambda: absorbed('fused', channels=1, norms='remove'),
        'channels auto': absorbed,
        'control': control,
        'affine FFNs': lambda: ap(with_affine_ffns(teacher, images)),
        'norms as scales': lambda: ap(with_scales_for_norms(teacher, images)),
        'thin blocks': lambda: measured(with_thin_blocks(teacher, images, 1 / 6)),
        'tuned': lambda: tuned('tuned', 'fused'),
        'tuned without labels': lambda: tuned('tuned_without_labels', 'fused', no_labels),
        # As a user has it who gives the tool --images.
        'tuned on a folder': lambda: tuned('tuned_on_folder', 'fused', pictures=Path(args.data_root, 'images/train')),
        'for int8': lambda: absorbed(channels=1, norms='remove', int8=True),
    }
    for share in CHANNELS:
        name, way = f'channels{100 * share:.0f}', f'channels {share}'
        ways[way] = partial(absorbed, name, channels=share)
        ways[f'{way}, tuned without labels'] = partial(tuned, f'{name}_tuned', name, no_labels)
        ways[f'{way}, tuned'] = partial(tuned, f'{name}_tuned_with_labels', name)
        ways[f'{way}, from scratch'] = partial(from_scratch, name)
    for way in ('teacher', *(f'channels {share}' for share in CHANNELS)):
        ways[f'{way}, bfloat16'] = lambda way=way: ap(slab_det.deploy(student_of(way), dtype=torch.bfloat16))
        for name, severity in product(CORRUPTIONS, SEVERITIES):
            other = corrupted(cfg, name, severity)
            ways[f'{way}, {name} {severity}'] = lambda way=way, other=other: ap(student_of(way), other)
    for pattern in ('teacher', *args.ways):
        for way in fnmatch.filter(ways, pattern):
            print(results.measure_once(dict(name=way, seed=seed), ways[way]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('dataset', choices=CONFIGS)
    parser.add_argument('--data-root', required=True)
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--iterations', type=int, default=500, help='of the teachers (default %(default)s)')
    parser.add_argument('--num-images', type=int, default=100, help='to absorb on (default %(default)s)')
    parser.add_argument('--work-dir', default='work_dirs/absorb')
    parser.add_argument(
        '--ways', nargs='*', default=WAYS, help="names or patterns, such as 'channels 0.5*'; none: the teacher alone"
    )
    parser.add_argument(
        '--teachers', type=Path, default=Path('work_dirs/hard'), help='work dir of benchmarks.hard.train'
    )
    parser.add_argument('--width', type=int, default=48, help='of the teachers of hard (default %(default)s)')
    args = parser.parse_args()
    runtime.install()
    torch.set_num_threads(1)
    args.teachers = args.teachers.resolve()
    name = args.dataset if args.iterations == 500 else f'{args.dataset}_{args.iterations}'
    results = Results(FOLDER / f'absorb_{name}.json', dataset=args.dataset, iterations=args.iterations)
    for seed in args.seeds:
        measure_seed(args, results, seed, Path(args.work_dir).resolve() / name / f'seed{seed}')


if __name__ == '__main__':
    main()
