"""What each step of slab_det.absorb brings: every norm gone, no training.

    python -m benchmarks.absorb.ablation bccd --data-root data/bccd --work-dir work_dirs/absorb

The teachers are those of benchmarks/absorb/run.py in the same WORK_DIR. Cells are added to
benchmarks/results/absorb_ablation_DATASET.json; what is there is not measured again.
"""

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
from mmengine.config import Config

from benchmarks.absorb.run import CONFIGS, IN_PROCESS, METRICS, ROOT, Cells
from slab_det import runtime
from slab_det.absorption import regression, student
from slab_det.absorption.plan import AbsorptionPlan, Writer
from slab_det.checkpoints.build import build_detector
from slab_det.data import set_data_root
from slab_det.measure.agreement import agreement, detect
from slab_det.measure.evaluate import evaluate
from slab_det.recalibration import recalibration_dataloader
from slab_det.recalibration.moments import evaluating


def without(plan: AbsorptionPlan, neck: bool = False, writers: bool = False) -> None:
    """Takes steps out of a plan."""
    if neck:
        plan.steps = [[s for s in steps if not getattr(s, 'layer', '').startswith('neck.')] for steps in plan.steps]
    if writers:
        plan.steps = [[step for step in steps if not isinstance(step, Writer)] for steps in plan.steps]


def fit_diagonal(moments: regression.CrossMoments, held_out: regression.CrossMoments, prior: torch.Tensor) -> tuple:
    """The prior itself, with the best shift."""
    return next(regression.ridge_fits(moments, prior, (1e9,))), 1e9


def fit_best(moments: regression.CrossMoments, held_out: regression.CrossMoments, prior: torch.Tensor) -> tuple:
    """Weaker pulls too, and no slack."""
    ridges = tuple(10.0**power for power in range(-6, 3))
    fits = zip(regression.ridge_fits(moments, prior, ridges), ridges, strict=True)
    return min(fits, key=lambda fit: held_out.unexplained(fit[0]))


def add_tenth(moments: regression.CrossMoments, x: torch.Tensor, y: torch.Tensor) -> None:
    """Every tenth token."""
    ADD(moments, x.flatten(0, -2)[::10], y.flatten(0, -2)[::10])


ADD = regression.CrossMoments.add
# Images, what is taken out of the plan, what takes the place of which part of the code.
WAYS: dict[str, tuple[int, dict[str, bool], list]] = {
    'all steps': (100, {}, []),
    'without the neck': (100, dict(neck=True), []),
    'without the writers': (100, dict(writers=True), []),
    'without both': (100, dict(neck=True, writers=True), []),
    'one scale per channel, without both': (
        100, dict(neck=True, writers=True), [(student, 'choose_fit', fit_diagonal)],
    ),
    'the best ridge from 1e-6 on': (100, {}, [(student, 'choose_fit', fit_best)]),
    'every tenth token': (100, {}, [(regression.CrossMoments, 'add', add_tenth)]),
    '25 images': (25, {}, []),
    '400 images': (400, {}, []),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('dataset', choices=CONFIGS)
    parser.add_argument('--data-root', required=True)
    parser.add_argument('--work-dir', default='work_dirs/absorb')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0])
    parser.add_argument('--ways', nargs='+', default=[*WAYS], help='all of them by default')
    args = parser.parse_args()
    runtime.install()
    torch.set_num_threads(1)
    cfg = Config.fromfile(ROOT / CONFIGS[args.dataset])
    set_data_root(cfg, args.data_root)
    cfg.val_dataloader.update(IN_PROCESS)
    cells = Cells(ROOT / f'benchmarks/results/absorb_ablation_{args.dataset}.json')

    def measure(way: str, seed: int) -> dict:
        num_images, left_out, patches = WAYS[way]
        folder = Path(args.work_dir).resolve() / args.dataset / f'seed{seed}/teacher'
        teacher = build_detector(cfg, (folder / 'last_checkpoint').read_text().strip())
        images = recalibration_dataloader(cfg, num_images, 'test')
        with tempfile.TemporaryDirectory() as files, evaluating(teacher), ExitStack() as stack:
            for place, name, value in patches:
                stack.enter_context(patch.object(place, name, value))
            plan = AbsorptionPlan(teacher, images, Path(files))
            without(plan, **left_out)
            model = student.Absorption(plan, progress=False).student
            agreed = agreement(*(detect(one, plan.images.held_out) for one in (teacher, model)))
        return dict(AP=evaluate(model, cfg)[METRICS[args.dataset]]['AP'], agreement=agreed)

    for seed in args.seeds:
        for way in args.ways:
            cells.measure(way, seed, lambda way=way, seed=seed: measure(way, seed))


if __name__ == '__main__':
    main()
