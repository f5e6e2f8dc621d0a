"""Absorbs the norms of trained LayerNorm detectors and tunes them: AP beside the teachers, which are trained first.

    python -m benchmarks.absorb.run bccd --data-root data/bccd --seeds 0 1 2
    python -m benchmarks.absorb.run dsb2018 --data-root data/dsb2018 --iterations 2000

Each cell, one way of one seed, is measured once and added to benchmarks/results/absorb_DATASET.json; what is there is
not measured again. Trainings are calls of tools/train.py in WORK_DIR, and go on where they were interrupted.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.runner import Runner
from torch import nn

from slab_det import runtime
from slab_det.checkpoints.build import build_detector
from slab_det.conversion import write_tune_config
from slab_det.data import set_data_root
from slab_det.fusion import save_fused
from slab_det.measure.agreement import agreement, detect
from slab_det.measure.environment import describe_environment
from slab_det.measure.evaluate import evaluate
from slab_det.recalibration import recalibration_dataloader

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = {
    'bccd': 'benchmarks/bccd/faster_rcnn_swin_small.py',
    'dsb2018': 'benchmarks/dsb2018/mask_rcnn_swin_small.py',
}
METRICS = {'bccd': 'bbox', 'dsb2018': 'segm'}
FINETUNE = ROOT / 'benchmarks/finetune/schedule.py'
TUNE = ROOT / 'configs/_base_/schedules/tune_absorbed.py'
IN_PROCESS = dict(num_workers=0, persistent_workers=False)
WAYS = (
    'all gone', 'default', 'control', 'tuned', 'tuned without labels', 'tuned on a folder', 'for int8', 'bfloat16',
    'all gone, on validation images',
)  # fmt: skip


class Cells:
    """Measured cells by way and seed, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values = json.loads(path.read_text()) if path.exists() else {'cells': {}}
        self.values['environment'] = describe_environment()

    def measure(self, way: str, seed: int, run: Callable[[], dict]) -> dict:
        """What is stored of this way and seed, or what ``run`` measures, which is stored."""
        seeds = self.values['cells'].setdefault(way, {})
        if str(seed) not in seeds:
            started = time.perf_counter()
            seeds[str(seed)] = run()
            seeds[str(seed)]['seconds'] = round(time.perf_counter() - started, 1)
            self.path.write_text(json.dumps(self.values, indent=1) + '\n')
        print(f'{way}, seed {seed}: {seeds[str(seed)]}', flush=True)
        return seeds[str(seed)]


def train(config: str | Path, work_dir: Path, data_root: str | None, *options: str) -> Path:
    """Trains by tools/train.py and returns the last checkpoint; without ``data_root`` on pictures alone."""
    if not (work_dir / 'done').exists():
        kinds = ('train', 'val') if data_root else ('train',)
        loaders = [f'{kind}_dataloader.{key}={value}' for kind in kinds for key, value in IN_PROCESS.items()]
        command = [sys.executable, ROOT / 'tools/train.py', config, '--work-dir', work_dir]
        command += ['--data-root', data_root] if data_root else []
        resume = ['--resume'] if (work_dir / 'last_checkpoint').exists() else []
        work_dir.mkdir(parents=True, exist_ok=True)
        with open(work_dir / 'log.txt', 'a') as log:
            subprocess.run(
                [*map(str, command), *resume, '--cfg-options', *loaders, *options],
                check=True, stdout=log, stderr=log, env={**os.environ, 'PYTHONPATH': str(ROOT)},
            )  # fmt: skip
        (work_dir / 'done').touch()
    return Path((work_dir / 'last_checkpoint').read_text().strip())


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('dataset', choices=CONFIGS)
    parser.add_argument('--data-root', required=True)
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--iterations', type=int, default=500, help='of the teachers (default %(default)s)')
    parser.add_argument('--num-images', type=int, default=100, help='to absorb on (default %(default)s)')
    parser.add_argument('--work-dir', default='work_dirs/absorb')
    parser.add_argument('--ways', nargs='*', default=WAYS, choices=WAYS, help='default: all; none: the teacher alone')
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    runtime.install()
    torch.set_num_threads(1)
    name = args.dataset if args.iterations == 500 else f'{args.dataset}_{args.iterations}'
    cells = Cells(ROOT / f'benchmarks/results/absorb_{name}.json')
    for seed in args.seeds:
        measure_seed(args, cells, seed, Path(args.work_dir).resolve() / name / f'seed{seed}')


def measure_seed(args: argparse.Namespace, cells: Cells, seed: int, folder: Path) -> None:
    cfg = Config.fromfile(ROOT / CONFIGS[args.dataset])
    set_data_root(cfg, args.data_root)
    cfg.val_dataloader.update(IN_PROCESS)
    end = args.iterations
    length = [f'train_cfg.max_iters={end}', f'train_cfg.val_interval={end}', f'param_scheduler.1.end={end}',
              f'param_scheduler.1.T_max={end - 100}', f'randomness.seed={seed}']  # fmt: skip
    checkpoint = train(CONFIGS[args.dataset], folder / 'teacher', args.data_root, *length)
    teacher = build_detector(cfg, str(checkpoint))
    images = recalibration_dataloader(cfg, args.num_images, 'test')
    work_dir = folder / 'absorbed'
    # With every norm gone.
    fused, fused_config = folder / 'fused.pth', folder / 'fused_config.py'

    def ap(model: nn.Module) -> dict:
        return dict(AP=evaluate(model, cfg)[METRICS[args.dataset]]['AP'])

    def absorbed(stem: str, keep: int | None, int8: bool = False) -> dict:
        student = slab_det.absorb(teacher, images, keep=keep, int8=int8, work_dir=work_dir, progress=False)
        report = student.absorption_report
        values = dict(**ap(student), kept=[norm.norm for norm in report.kept], agreement=report.agreement)
        save_fused(student, cfg, folder / f'{stem}.pth', teacher.dataset_meta)
        return values

    def tuned(name: str, *options: str, pictures: Path | None = None) -> dict:
        config = write_tune_config(cfg, fused_config, fused, checkpoint, Config.fromfile(TUNE), pictures)
        last = train(config, folder / name, None if pictures else args.data_root, *options)
        return ap(build_detector(Config.fromfile(fused_config), str(last)))

    def control() -> dict:
        # The schedule without its hooks: they are for norms that can be fused.
        schedule = Config.fromfile(FINETUNE).to_dict()
        values = {key: schedule[key] for key in ('train_cfg', 'optim_wrapper', 'param_scheduler')}
        values = {**cfg.to_dict(), **values, 'load_from': str(checkpoint)}
        config = folder / 'control_config.py'
        config.write_text(Config(values).pretty_text)
        last = train(config, folder / 'control', args.data_root, f'randomness.seed={seed}')
        return ap(build_detector(cfg, str(last)))

    def on_validation() -> dict:
        student = slab_det.absorb(teacher, images, keep=0, work_dir=work_dir, progress=False)
        loader = Runner.build_dataloader(cfg.val_dataloader)
        return dict(agreement=agreement(detect(teacher, loader), detect(student, loader)))

    def in_bfloat16() -> dict:
        student = build_detector(Config.fromfile(fused_config), str(fused))
        of_teacher = ap(slab_det.deploy(teacher, torch.bfloat16))
        return dict(**ap(slab_det.deploy(student, torch.bfloat16)), teacher_AP=of_teacher['AP'])

    cells.measure('teacher', seed, lambda: ap(teacher))
    ways = {
        'all gone': lambda: absorbed('fused', 0),
        'default': lambda: absorbed('default', None),
        'control': control,
        'tuned': lambda: tuned('tuned'),
        'tuned without labels': lambda: tuned('tuned_without_labels', 'model.task_weight=0'),
        # As a user has it who gives the tool --images.
        'tuned on a folder': lambda: tuned('tuned_on_folder', pictures=Path(args.data_root, 'images/train')),
        'for int8': lambda: absorbed('int8', 0, int8=True),
        'bfloat16': in_bfloat16,
        'all gone, on validation images': on_validation,
    }
    for way in args.ways:
        cells.measure(way, seed, ways[way])


if __name__ == '__main__':
    main()
