"""Takes hidden channels out of BN+FFNBN detectors that benchmarks/norms/run.py trained: AP beside them, and controls.

    python -m benchmarks.norms.run bccd-norms --iterations 600 --only bn_ffnbn --data-root data/bccd
    python -m benchmarks.absorb.ffn bccd-norms-600 --data-root data/bccd --seeds 0 1 2

A row, one way with one seed, is measured once and added to benchmarks/results/ffn_STUDY.json. Corrupted images need
imagecorruptions, which requirements/test.txt has.
Rows "with A" and "chosen beside A" are of an earlier form, ``A x + b + fc2(act(fc1 x))`` with a matrix A of C x C: a
share s with A costs as much as s - 1/8 without. Rows "cut" and "channels at random" chose their channels beside A, too;
benchmarks/absorb/grid.py compares such ways for any detector.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
from pathlib import Path

import torch
from mmengine.config import Config
from torch import nn

from benchmarks.absorb.run import CORRUPTIONS, IN_PROCESS, METRICS, corrupted
from benchmarks.results import FOLDER, Results
from slab_det import runtime
from slab_det.checkpoints import build_detector
from slab_det.preflight import set_data_root
from slab_det.measure.evaluate import evaluate
from slab_det.recalibration import recalibration_dataloader

SHARES = (0.5, 0.625, 0.75, 0.875)


def measure_seed(args: argparse.Namespace, results: Results, seed: int, folder: Path) -> None:
    """Measures every way with the detector of one seed."""
    cfg = Config.fromfile(folder / 'fused_config.py')
    trained = Config.fromfile(folder / 'merged' / 'config.py')
    for config in (cfg, trained):
        set_data_root(config, args.data_root)
    cfg.val_dataloader.update(IN_PROCESS)
    teacher = build_detector(cfg, str(folder / 'fused.pth'))
    images = recalibration_dataloader(trained, args.num_images, 'test')

    def prune(share: float) -> nn.Module:
        return slab_det.absorb(teacher, images, keep='all', ffn=share, work_dir=folder / 'pruned', progress=False)

    def ap(model: nn.Module, corruption: str | None = None) -> dict:
        config = corrupted(cfg, corruption, severity=3) if corruption else cfg
        return dict(AP=evaluate(model, config)[METRICS[args.study.partition('-')[0]]]['AP'])

    def pruned(share: float) -> dict:
        model = prune(share)
        report = model.absorption_report
        return dict(**ap(model), agreement=report.agreement, hidden=[place.kept for place in report.pruned])

    ways = {'teacher': lambda: ap(teacher)}
    ways |= {f'pruned {share}': lambda share=share: pruned(share) for share in SHARES}
    for corruption in CORRUPTIONS:
        ways[f'teacher, {corruption}'] = lambda corruption=corruption: ap(teacher, corruption)
        ways[f'pruned 0.75, {corruption}'] = lambda corruption=corruption: ap(prune(0.75), corruption)
    for way in args.ways or ways:
        print(results.measure_once(dict(name=way, seed=seed), ways[way]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('study', help='such as bccd-norms-600: a folder of WORK_DIR')
    parser.add_argument('--data-root', required=True)
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--num-images', type=int, default=100, help='to absorb on (default %(default)s)')
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/norms'))
    parser.add_argument('--ways', nargs='*', help='default: all')
    args = parser.parse_args()
    runtime.install()
    torch.set_num_threads(1)
    results = Results(FOLDER / f'ffn_{args.study}.json', study=args.study, run='bn_ffnbn')
    for seed in args.seeds:
        measure_seed(args, results, seed, args.work_dir.resolve() / args.study / 'bn_ffnbn' / f'seed{seed}')


if __name__ == '__main__':
    main()
