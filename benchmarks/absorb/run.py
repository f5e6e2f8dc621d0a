"""Absorbs the norms of trained LayerNorm detectors and tunes them: AP beside the teachers, which are trained first.

    python -m benchmarks.absorb.run bccd --data-root data/bccd --seeds 0 1 2
    python -m benchmarks.absorb.run dsb2018 --data-root data/dsb2018 --iterations 2000

A row, one way with one seed, is measured once and added to benchmarks/results/absorb_DATASET.json; what is there is
not measured again. Trainings are calls of tools/train.py in WORK_DIR, and go on where they were interrupted.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
from mmengine.config import Config
from torch import nn

from benchmarks.results import FOLDER, ROOT, Results
from slab_det import runtime
from slab_det.checkpoints import build_detector
from slab_det.conversion import write_tune_config
from slab_det.data import set_data_root
from slab_det.fusion import save_fused
from slab_det.measure.evaluate import evaluate
from slab_det.recalibration import recalibration_dataloader

CONFIGS = {
    'bccd': 'benchmarks/bccd/faster_rcnn_swin_small.py',
    'dsb2018': 'benchmarks/dsb2018/mask_rcnn_swin_small.py',
}
METRICS = {'bccd': 'bbox', 'dsb2018': 'segm'}
FINETUNE = ROOT / 'benchmarks/finetune/schedule.py'
TUNE = ROOT / 'configs/_base_/schedules/tune_absorbed.py'
IN_PROCESS = dict(num_workers=0, persistent_workers=False)
# Shares of the multiply-adds that stay, of detectors that keep their norms.
CHANNELS = (0.7, 0.5, 0.35)
WAYS = ('all gone', 'default', 'control', 'tuned', 'tuned without labels', 'tuned on a folder', 'for int8')
WAYS += tuple(f'channels {share}' for share in CHANNELS)


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


def measure_seed(args: argparse.Namespace, results: Results, seed: int, folder: Path) -> None:
    """Trains the teacher of a seed and measures every way that ``args`` ask for."""
    cfg = Config.fromfile(ROOT / CONFIGS[args.dataset])
    set_data_root(cfg, args.data_root)
    cfg.val_dataloader.update(IN_PROCESS)
    end = args.iterations
    length = [f'train_cfg.max_iters={end}', f'train_cfg.val_interval={end}', f'param_scheduler.1.end={end}',
              f'param_scheduler.1.T_max={end - 100}', f'randomness.seed={seed}']  # fmt: skip
    checkpoint = train(CONFIGS[args.dataset], folder / 'teacher', args.data_root, *length)
    teacher = build_detector(cfg, str(checkpoint))
    images = recalibration_dataloader(cfg, args.num_images, 'test')
    # The student of 'all gone', which the tuned ones start from.
    fused, fused_config = folder / 'fused.pth', folder / 'fused_config.py'

    def ap(model: nn.Module) -> dict:
        return dict(AP=evaluate(model, cfg)[METRICS[args.dataset]]['AP'])

    def absorbed(**options: object) -> dict:
        student = slab_det.absorb(teacher, images, work_dir=folder / 'absorbed', progress=False, **options)
        report = student.absorption_report
        if options == dict(keep=0):
            save_fused(student, cfg, fused, teacher.dataset_meta)
        values = dict(**ap(student), kept=[norm.norm for norm in report.kept], agreement=report.agreement)
        if report.multiply_adds:
            before, after = report.multiply_adds
            places = {place.place: (place.kept, place.channels) for place in report.pruned}
            values |= dict(share=round(after / before, 4), channels=places)
        return values

    def tuned(name: str, *options: str, pictures: Path | None = None) -> dict:
        config = write_tune_config(cfg, fused_config, fused, checkpoint, Config.fromfile(TUNE), pictures)
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

    ways = {
        'teacher': lambda: ap(teacher),
        'all gone': lambda: absorbed(keep=0),
        'default': absorbed,
        'control': control,
        'tuned': lambda: tuned('tuned'),
        'tuned without labels': lambda: tuned('tuned_without_labels', 'model.task_weight=0'),
        # As a user has it who gives the tool --images.
        'tuned on a folder': lambda: tuned('tuned_on_folder', pictures=Path(args.data_root, 'images/train')),
        'for int8': lambda: absorbed(keep=0, int8=True),
        **{f'channels {share}': lambda share=share: absorbed(keep='all', channels=share) for share in CHANNELS},
    }
    for way in ('teacher', *args.ways):
        print(results.measure_once(dict(name=way, seed=seed), ways[way]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('dataset', choices=CONFIGS)
    parser.add_argument('--data-root', required=True)
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--iterations', type=int, default=500, help='of the teachers (default %(default)s)')
    parser.add_argument('--num-images', type=int, default=100, help='to absorb on (default %(default)s)')
    parser.add_argument('--work-dir', default='work_dirs/absorb')
    parser.add_argument('--ways', nargs='*', default=WAYS, choices=WAYS, help='default: all; none: the teacher alone')
    args = parser.parse_args()
    runtime.install()
    torch.set_num_threads(1)
    name = args.dataset if args.iterations == 500 else f'{args.dataset}_{args.iterations}'
    results = Results(FOLDER / f'absorb_{name}.json', dataset=args.dataset, iterations=args.iterations)
    for seed in args.seeds:
        measure_seed(args, results, seed, Path(args.work_dir).resolve() / name / f'seed{seed}')


if __name__ == '__main__':
    main()
