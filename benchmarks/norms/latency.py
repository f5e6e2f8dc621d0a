"""Latency of what a study's runs serve, interleaved in one process, beside their AP.

    python benchmarks/norms/latency.py bccd-norms --threads 1
    python benchmarks/norms/latency.py bccd-norms --table-only

Of every run that finished, the model of the first of --seeds that is there: fused, or as it was trained where it has
LayerNorm. Which seed matters only in so far as models find other numbers of objects. Written into
benchmarks/results/norms_STUDY_latency.json, as a table below the line `<!-- latency STUDY -->` of docs/results.md, and
as AP over latency into docs/results_STUDY_latency.png. Freed memory is kept, so glibc is needed: else a model would be
charged for fresh pages by what the others have left. Let nothing else run meanwhile.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import json
import os
import statistics

import numpy as np
from mmdet.datasets import BaseDetDataset
from mmdet.datasets.transforms import Resize
from mmdet.registry import DATASETS
from mmengine.config import Config
from mmengine.runner import find_latest_checkpoint
from torch import nn

from benchmarks.experiments import ROOT, replace_table
from benchmarks.norms.jobs import jobs_of
from benchmarks.norms.results import write_results
from benchmarks.norms.studies import STUDIES, Study
from benchmarks.norms.table import by_seed, title
from slab_det.cli import read_config
from slab_det.data import set_data_root
from slab_det.checkpoints.build import build_detector
from slab_det.measure.figures import draw_ap_latency
from slab_det.measure.latency import SCOPES
from slab_det.measure.reporting import ReportEntry, describe_dataset

# Without what happens per object, and with it: trained models find different numbers of objects.
MEASURED = ('backbone+neck', 'detector')


def served_model(folder: Path) -> tuple[nn.Module, Config, str]:
    """The detector that a run's folder holds, its config as it was trained, and 'fused' or 'unfused'."""
    trained = Config.fromfile(folder / 'merged' / 'config.py')
    fused = folder / 'fused.pth'
    if fused.exists():
        return build_detector(read_config(str(folder / 'fused_config.py')), str(fused)), trained, 'fused'
    checkpoint = find_latest_checkpoint(str(folder))
    if checkpoint is None:
        raise SystemExit(f'{folder} has neither fused.pth nor a checkpoint; remove it and train it anew')
    return build_detector(trained.copy(), checkpoint), trained, 'unfused'


def first_image(dataset: BaseDetDataset) -> tuple[str, tuple[int, int]]:
    """The first image, and (H, W) of what testing makes of it."""
    info = dataset.get_data_info(0)
    tested = dict(img=np.zeros((info['height'], info['width'], 3), np.uint8))
    for step in dataset.pipeline.transforms:
        if isinstance(step, Resize):
            tested = step(tested)
    return info['img_path'], tested['img'].shape[:2]


def measure(study: Study, seeds: list[int], work_dir: Path, data_root: str, rounds: int, threads: int | None) -> dict:
    """Measures every finished run of ``study``; all are in memory at once, and take turns."""
    chosen = {}
    for job in jobs_of(study, seeds, work_dir, data_root):
        # Those whose results count.
        if job.done and job.done.status == 'finished' and not job.obstacle():
            chosen.setdefault(job.name, job)
    if not chosen:
        raise SystemExit(
            f'no run of {study.name} with seed {" or ".join(map(str, seeds))} has finished below {work_dir}'
        )
    served = {run.name: served_model(chosen[run.name].folder) for run in study.runs if run.name in chosen}
    cfg = next(iter(served.values()))[1]
    set_data_root(cfg, data_root)
    dataset = DATASETS.build(cfg.test_dataloader.dataset)
    image, size = first_image(dataset)
    models = {name: model for name, (model, _, _) in served.items()}
    latencies = {
        scope: slab_det.measure_latency(
            models, size, rounds, scope=scope, threads=threads, image=image, progress=True, keep_memory=True
        )
        for scope in MEASURED
    }
    return {
        name: dict(
            variant=variant,
            seed=chosen[name].seed,
            dataset=describe_dataset(dataset),
            latency={scope: found[name].to_dict() for scope, found in latencies.items()},
        )
        for name, (_, cfg, variant) in served.items()
    }


def mean_ap(run: dict) -> float | None:
    """Over the seeds; None if one of them failed, since the others are no fair sample then."""
    values = by_seed(run)
    return statistics.mean(values.values()) if len(values) == len(run['seeds']) else None


def markdown(runs: dict, latency: dict, metric: str) -> str:
    """One row per run, ratios to the run that it is compared with."""
    lines = [
        f'| run | {metric} | {" | ".join(f"{scope}, ms | ratio" for scope in MEASURED)} |',
        f'|---|---:|{"---:|" * 2 * len(MEASURED)}',
    ]
    for name, found in latency.items():
        ap = mean_ap(runs[name])
        cells = [title(runs[name]), 'a seed failed' if ap is None else f'{ap:.3f}']
        for scope in MEASURED:
            own = found['latency'][scope]['median_ms']
            control = latency.get(runs[name]['control'])
            cells += [f'{own:.1f}', f'{own / control["latency"][scope]["median_ms"]:.2f}' if control else '–']
        lines.append(f'| {" | ".join(cells)} |')
    return '\n'.join(lines)


def entries(study: Study, runs: dict, latency: dict) -> list[ReportEntry]:
    """What the figure shows: the runs none of whose seeds failed."""
    detector = Config.fromfile(study.base.config).model.type
    return [
        ReportEntry(
            name=title(runs[name]),
            variant=measured['variant'],
            norm='',
            attention='',
            detector=detector,
            config=name,
            dataset=measured['dataset'],
            ap={study.base.metric: dict(AP=ap)},
            latency=measured['latency']['detector'],
        )
        for name, measured in latency.items()
        if (ap := mean_ap(runs[name])) is not None
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('study', choices=[name for name, study in STUDIES.items() if not study.recalibrations])
    parser.add_argument('--data-root', help='default: data/DATASET')
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/norms'))
    parser.add_argument('--seeds', type=int, nargs='+', default=[0], help='in order of preference')
    parser.add_argument('--rounds', type=int, default=100)
    parser.add_argument('--threads', type=int)
    parser.add_argument('--table-only', action='store_true', help='measure nothing: write table and picture again')
    args = parser.parse_args()
    study = STUDIES[args.study]
    os.chdir(ROOT)
    results = json.loads(Path(f'benchmarks/results/norms_{study.name}.json').read_text())
    file = Path(f'benchmarks/results/norms_{study.name}_latency.json')
    if not args.table_only:
        data_root = args.data_root or f'data/{study.base.name}'
        latency = measure(study, args.seeds, args.work_dir, data_root, args.rounds, args.threads)
        write_results(file, dict(scopes={scope: SCOPES[scope].timed for scope in MEASURED}, runs=latency))
    latency = json.loads(file.read_text())['runs']
    table = markdown(results['runs'], latency, f'{results["metric"]}, mean over seeds')
    print(table)
    replace_table(Path('docs/results.md'), f'latency {study.name}', table)
    draw_ap_latency(entries(study, results['runs'], latency), Path(f'docs/results_{study.name}_latency.png'))


if __name__ == '__main__':
    main()
