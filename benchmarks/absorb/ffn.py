"""Takes hidden channels out of BN+FFNBN detectors that benchmarks/norms/run.py trained: AP beside them, and controls.

    python -m benchmarks.norms.run bccd-norms --iterations 600 --only bn_ffnbn --data-root data/bccd
    python -m benchmarks.absorb.ffn bccd-norms-600 --data-root data/bccd --seeds 0 1 2

A row, one way with one seed, is measured once and added to benchmarks/results/ffn_STUDY.json. Corrupted images need
`pip install imagecorruptions "setuptools<80"`.
Rows "with A" and "chosen beside A" are of an earlier form, ``A x + b + fc2(act(fc1 x))`` with a matrix A of C x C: a
share s with A costs as much as s - 1/8 without.
"""

import slab_det  # noqa: I001 (before mmdet: registers everything)

import argparse
import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import torch
from mmcv.transforms import BaseTransform
from mmdet.registry import TRANSFORMS
from mmengine.config import Config
from torch import Tensor, nn

from benchmarks.absorb.run import IN_PROCESS, METRICS
from benchmarks.results import FOLDER, Results
from slab_det import runtime
from slab_det.absorption import student
from slab_det.absorption.regression import Affine, CrossMoments, choose_fit
from slab_det.checkpoints import build_detector
from slab_det.data import set_data_root
from slab_det.measure.evaluate import evaluate
from slab_det.recalibration import recalibration_dataloader

SHARES = (0.5, 0.625, 0.75, 0.875)
CORRUPTIONS = ('defocus_blur', 'gaussian_noise', 'contrast', 'jpeg_compression')
SEVERITY = 3


@TRANSFORMS.register_module()
class CorruptImage(BaseTransform):
    """One of the corruptions of Hendrycks and Dietterich (ICLR 2019), of medium severity."""

    def __init__(self, name: str) -> None:
        self.name = name

    def transform(self, results: dict) -> dict:
        """Corrupts the image."""
        from imagecorruptions import corrupt

        return results | dict(img=corrupt(results['img'], corruption_name=self.name, severity=SEVERITY))


def rank_at_random(moments: CrossMoments) -> Tensor:
    """Channels in any order."""
    return torch.randperm(len(moments.mean_x), generator=torch.Generator().manual_seed(0))


def cut(moments: CrossMoments, held_out: CrossMoments, prior: Tensor) -> Affine:
    """The old weights of the channels that stay, with the mean of the others."""
    if not prior.any():
        # No FFN: a layer that writes the stream is fitted to it as always.
        return choose_fit(moments, held_out, prior)
    return Affine(prior, moments.mean_y - prior @ moments.mean_x)


CONTROLS = {
    'cut': dict(choose_fit=cut),
    'channels at random': dict(rank_channels=rank_at_random),
}


def measure_seed(args: argparse.Namespace, results: Results, seed: int, folder: Path) -> None:
    """Measures every way with the detector of one seed."""
    cfg = Config.fromfile(folder / 'fused_config.py')
    trained = Config.fromfile(folder / 'merged' / 'config.py')
    for config in (cfg, trained):
        set_data_root(config, args.data_root)
    cfg.val_dataloader.update(IN_PROCESS)
    teacher = build_detector(cfg, str(folder / 'fused.pth'))
    images = recalibration_dataloader(trained, args.num_images, 'test')

    def prune(share: float, **patches: Callable) -> nn.Module:
        # A work_dir would go on from students without patches.
        work_dir = None if patches else folder / 'pruned'
        with mock.patch.multiple(student, **patches) if patches else nullcontext():
            return slab_det.absorb(teacher, images, ffn=share, work_dir=work_dir, progress=False)

    def ap(model: nn.Module, corruption: str | None = None) -> dict:
        config = copy.deepcopy(cfg)
        if corruption:
            steps = config.val_dataloader.dataset.pipeline
            steps.insert(1, dict(type='mmdet.CorruptImage', name=corruption))
        return dict(AP=evaluate(model, config)[METRICS[args.study.partition('-')[0]]]['AP'])

    def pruned(share: float, **patches: Callable) -> dict:
        model = prune(share, **patches)
        report = model.absorption_report
        return dict(**ap(model), agreement=report.agreement, hidden=[place.kept for place in report.pruned])

    ways = {'teacher': lambda: ap(teacher)}
    ways |= {f'pruned {share}': lambda share=share: pruned(share) for share in SHARES}
    ways |= {f'{name} 0.75': lambda patches=patches: pruned(0.75, **patches) for name, patches in CONTROLS.items()}
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
