"""From a LayerNorm detector to one without norms: ways of getting there, same budget, several seeds.

    python benchmarks/finetune/run.py bccd --data-root data/bccd --seeds 0 1 2
    python benchmarks/finetune/run.py dsb2018 --data-root data/dsb2018 --seeds 0 1 2
    python benchmarks/finetune/run.py bccd --table-only

Every step is a command of tools/, printed before it runs; a step whose result is there is not run again. Paths are
relative to the repository. Results go into benchmarks/results/finetune_DATASET.json, the table into docs/finetune.md
and the curves into docs/finetune_DATASET.png.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import json
import os
import statistics
from dataclasses import dataclass

from mmengine.config import Config
from mmengine.runner import save_checkpoint

from benchmarks.experiments import ROOT, attempts, call, listed, replace_table, spread, tool
from slab_det.data import set_data_root
from slab_det.recalibration.images import recalibration_dataloader
from slab_det.checkpoints.build import build_detector
from slab_det.measure.environment import describe_environment
from slab_det.conversion import finetune_config

SCHEDULE = Path('benchmarks/finetune/schedule.py')


@dataclass(frozen=True)
class Task:
    """A dataset and the LayerNorm detector that is trained on it."""

    config: Path
    metric: str
    val_interval: int
    summary: str


TASKS = {
    'bccd': Task(
        Path('benchmarks/bccd/faster_rcnn_swin_small.py'),
        'bbox',
        50,
        'BCCD: 292 training, 72 validation images at 320x240; Faster R-CNN, Swin-32x2222, batch 4',
    ),
    'dsb2018': Task(
        Path('benchmarks/dsb2018/mask_rcnn_swin_small.py'),
        'segm',
        75,
        'DSB2018: 531 training images in crops of 256x256, 133 validation images at 512x512; '
        'Mask R-CNN, Swin-32x2222, batch 4',
    ),
}
METRICS = {'bbox': 'box AP', 'segm': 'mask AP'}
START = 'LayerNorm, 500 iterations'
# Label in the table, and what the step does; in the order of the table.
WAYS = {
    'layernorm': 'LayerNorm, 150 more',
    'token_bn_recalibrated': 'TokenBN in its place, recalibrated, no training',
    'prepbn_recalibrated': 'PRepBN calibrated, gamma = 0, recalibrated, no training',
    'token_bn': 'TokenBN in its place, 150 more',
    'prepbn': 'PRepBN, default start, 150 more',
    'prepbn_calibrated': 'PRepBN, calibrated start, 150 more',
}


TRAINED = [way for way in WAYS if not way.endswith('_recalibrated')]


class Experiment:
    """One seed: the LayerNorm detector and everything made of it, below ``folder``."""

    def __init__(self, task: Task, seed: int, folder: Path, data_root: str) -> None:
        self.task, self.seed, self.folder, self.data_root = task, seed, folder / f'seed{seed}', data_root
        self.trained = self.folder / 'start' / 'iter_500.pth'

    def run(self) -> None:
        """Runs what has no result yet."""
        if not self.trained.exists():
            self._train(self.task.config, 'start')
        for way in WAYS:
            if not (self.folder / way / 'done').exists():
                getattr(self, f'run_{way}')(way)
                (self.folder / way / 'done').touch()

    def run_layernorm(self, way: str) -> None:
        # The control: the LayerNorm detector trained on, with the same budget and no other change.
        self._finetune(self._replace(way, 'LN', hooks=[]), way)

    def run_token_bn(self, way: str) -> None:
        self._finetune(self._replace_by_token_bn(way), way)

    def run_prepbn(self, way: str) -> None:
        self._finetune(self._convert(way, num_images=0), way)

    def run_prepbn_calibrated(self, way: str) -> None:
        self._finetune(self._convert(way, num_images=100), way)

    def run_token_bn_recalibrated(self, way: str) -> None:
        self._recalibrate_and_test(self._replace_by_token_bn(way), self.trained, way)

    def run_prepbn_recalibrated(self, way: str) -> None:
        config = self._convert(way, num_images=100)
        self._recalibrate_and_test(config, config.with_name('converted.pth'), way)

    def _replace_by_token_bn(self, way: str) -> Path:
        # The naive way: every LayerNorm becomes a BatchNorm that starts with its weight and bias.
        return self._replace(way, 'TokenBN', hooks=[dict(type='RecalibrateFuseHook', num_images=100, pipeline='test')])

    def _replace(self, way: str, norm: str, hooks: list[dict]) -> Path:
        """A config of the fine-tune with another norm, whose own weights are the LayerNorm detector's."""
        schedule = Config.fromfile(SCHEDULE)
        schedule.custom_hooks = hooks
        config = self.folder / way / 'config.py'
        config.parent.mkdir(parents=True, exist_ok=True)
        finetune_config(Config.fromfile(self.task.config), schedule, dict(type=norm), self.trained).dump(config)
        return config

    def _finetune(self, config: Path, way: str) -> None:
        self._train(config, way, f'train_cfg.val_interval={self.task.val_interval}')

    def _train(self, config: Path, way: str, *options: str) -> None:
        call(
            tool(
                'train.py',
                config,
                '--work-dir',
                self.folder / way,
                '--data-root',
                self.data_root,
                '--cfg-options',
                f'randomness.seed={self.seed}',
                *options,
            )
        )

    def _convert(self, way: str, num_images: int) -> Path:
        target = self.folder / way / 'converted.pth'
        call(
            tool(
                'convert_checkpoint.py',
                self.trained,
                target,
                '--config',
                self.task.config,
                '--data-root',
                self.data_root,
                '--num-images',
                num_images,
                '--schedule',
                SCHEDULE,
            )
        )
        return target.with_name('converted_config.py')

    def _recalibrate_and_test(self, config: Path, checkpoint: Path, way: str) -> None:
        cfg = Config.fromfile(config)
        set_data_root(cfg, self.data_root)
        model = build_detector(cfg, str(checkpoint))
        slab_det.set_gamma(model, 0)
        slab_det.recalibrate(model, recalibration_dataloader(cfg, 100, 'test'))
        target = self.folder / way / 'recalibrated.pth'
        target.parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(dict(state_dict=model.state_dict()), str(target))
        call(tool('test.py', config, target, '--work-dir', target.parent, '--data-root', self.data_root))

    def curve(self, way: str) -> list[float]:
        """AP of the validations during a run, in their order."""
        key = f'coco/{self.task.metric}_mAP'
        curves = [[record[key] for record in records if key in record] for records in attempts(self.folder / way)]
        # Of the last attempt that trained: resuming a finished run only recalibrates it. mmengine logs no iteration
        # beside them.
        return next(curve for curve in reversed(curves) if curve)

    def final(self, way: str) -> float:
        """The AP that is left: after recalibration, where there is one."""
        report = self.folder / way / 'report.json'
        if report.exists():
            return json.loads(report.read_text())['entries'][0]['ap'][self.task.metric]['AP']
        return self.curve(way)[-1]


def summarize(task: Task, experiments: list[Experiment]) -> dict:
    """AP per way and seed, and the differences to the LayerNorm control, seed by seed."""
    ways = {'start': START, **WAYS}
    ap = {way: [e.final(way) for e in experiments] for way in ways}
    return dict(
        setting=task.summary,
        metric=METRICS[task.metric],
        seeds=[e.seed for e in experiments],
        labels=ways,
        ap=ap,
        iterations_between_validations=task.val_interval,
        curves={way: [e.curve(way) for e in experiments] for way in TRAINED},
        environment=describe_environment(),
    )


def table(results: dict) -> str:
    """Mean and std over seeds, and the paired difference to the control."""
    lines = [
        f'| way | {results["metric"]} per seed | mean ± std | minus control, per seed | mean ± std |',
        '|---|---|---:|---|---:|',
    ]
    control = results['ap']['layernorm']
    for way, label in results['labels'].items():
        ap = results['ap'][way]
        difference = [a - b for a, b in zip(ap, control, strict=True)]
        lines.append(
            f'| {label} | {listed(ap, "{:.3f}")} | {spread(ap, "{:.3f}")} '
            f'| {listed(difference, "{:+.3f}")} | {spread(difference, "{:+.3f}")} |'
        )
    return '\n'.join(lines)


def draw(results: dict, path: Path) -> None:
    """AP over fine-tuning iterations, one line per way, one thin line per seed; crosses where nothing was trained."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout='constrained')
    for i, (way, label) in enumerate(WAYS.items()):
        finals = results['ap'][way]
        if way not in TRAINED:
            axes.plot([0] * len(finals), finals, 'x', color=f'C{i}', label=label)
            continue
        # The last point is the final AP: where statistics were recalibrated, of that model.
        curves = [[*curve[:-1], final] for curve, final in zip(results['curves'][way], finals, strict=True)]
        steps = [results['iterations_between_validations'] * (k + 1) for k in range(len(curves[0]))]
        for curve in curves:
            axes.plot(steps, curve, color=f'C{i}', linewidth=0.8, alpha=0.5)
        axes.plot(
            steps, [statistics.mean(points) for points in zip(*curves, strict=True)], 'o-', color=f'C{i}', label=label
        )
    start = statistics.mean(results['ap']['start'])
    axes.axhline(start, color='gray', linestyle=':', label=f'{START}: {start:.3f}')
    axes.set(xlabel='fine-tuning iteration', ylabel=f'{results["metric"]} on validation images')
    axes.legend(fontsize=7, loc='lower right')
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('dataset', choices=TASKS)
    parser.add_argument('--data-root', help='default: data/DATASET')
    parser.add_argument('--work-dir', type=Path, help='default: work_dirs/finetune/DATASET')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--table-only', action='store_true', help='run nothing: write table and curves again')
    args = parser.parse_args()
    os.chdir(ROOT)
    task = TASKS[args.dataset]
    results_file = Path(f'benchmarks/results/finetune_{args.dataset}.json')
    if args.table_only:
        results = json.loads(results_file.read_text())
    else:
        folder = args.work_dir or Path('work_dirs/finetune', args.dataset)
        experiments = [Experiment(task, seed, folder, args.data_root or f'data/{args.dataset}') for seed in args.seeds]
        for experiment in experiments:
            experiment.run()
        results = summarize(task, experiments)
        results_file.write_text(json.dumps(results, indent=1) + '\n')
    print(table(results))
    replace_table(Path('docs/finetune.md'), args.dataset, table(results))
    draw(results, Path(f'docs/finetune_{args.dataset}.png'))


if __name__ == '__main__':
    main()
