"""What each step of slab_det.absorb brings, and how many images it takes: AP and agreement, every norm gone.

    python benchmarks/absorb/ablation.py bccd --data-root data/bccd --work-dir work_dirs/absorb

The teachers are those of benchmarks/absorb/run.py in the same WORK_DIR. Cells are added to
benchmarks/results/absorb_ablation_DATASET.json; what is there is not measured again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import tempfile
from collections.abc import Callable
from unittest.mock import patch

import torch
from mmengine.config import Config

from benchmarks.absorb.run import CONFIGS, IN_PROCESS, METRICS, ROOT, Cells
from slab_det import runtime
from slab_det.absorption import student
from slab_det.absorption.plan import AbsorptionPlan, Writer
from slab_det.absorption.regression import ridge_fits
from slab_det.checkpoints.build import build_detector
from slab_det.data import set_data_root
from slab_det.measure.agreement import agreement, detect
from slab_det.measure.evaluate import evaluate
from slab_det.recalibration import recalibration_dataloader
from slab_det.recalibration.moments import evaluating


def without_neck(plan: AbsorptionPlan) -> None:
    plan.outputs = []


def without_writers(plan: AbsorptionPlan) -> None:
    without_neck(plan)
    plan.steps = [[step for step in steps if not isinstance(step, Writer)] for steps in plan.steps]


def stay_at_the_prior(moments, held_out, prior):  # noqa: ANN001, ANN201 (that of choose_fit)
    return next(ridge_fits(moments, prior, (1e9,))), 1e9


# Change of the plan, and of the fit.
STEPS: dict[str, tuple[Callable, Callable]] = {
    'all steps': (lambda plan: None, student.choose_fit),
    'without the neck': (without_neck, student.choose_fit),
    'without neck and writers': (without_writers, student.choose_fit),
    'one scale per channel': (without_writers, stay_at_the_prior),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('dataset', choices=CONFIGS)
    parser.add_argument('--data-root', required=True)
    parser.add_argument('--work-dir', default='work_dirs/absorb')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--num-images', type=int, nargs='*', default=[10, 25, 50, 200], help='instead of 100')
    args = parser.parse_args()
    runtime.install()
    torch.set_num_threads(1)
    cfg = Config.fromfile(ROOT / CONFIGS[args.dataset])
    set_data_root(cfg, args.data_root)
    cfg.val_dataloader.update(IN_PROCESS)
    folder = Path(args.work_dir).resolve() / args.dataset / f'seed{args.seed}/teacher'
    teacher = build_detector(cfg, (folder / 'last_checkpoint').read_text().strip()).eval()
    cells = Cells(ROOT / f'benchmarks/results/absorb_ablation_{args.dataset}.json')

    def measure(num_images: int, change: Callable, choose_fit: Callable) -> dict:
        images = recalibration_dataloader(cfg, num_images, 'test')
        with tempfile.TemporaryDirectory() as files, evaluating(teacher):
            plan = AbsorptionPlan(teacher, images, Path(files))
            change(plan)
            with patch.object(student, 'choose_fit', choose_fit):
                model = student.Absorption(plan, progress=False).student
            found = [detect(one, plan.images.held_out) for one in (teacher, model)]
        return dict(AP=evaluate(model, cfg)[METRICS[args.dataset]]['AP'], agreement=agreement(*found))

    for name, (change, choose_fit) in STEPS.items():
        cells.measure(name, args.seed, lambda change=change, fit=choose_fit: measure(100, change, fit))
    for count in args.num_images:
        cells.measure(f'{count} images', args.seed, lambda count=count: measure(count, *STEPS['all steps']))


if __name__ == '__main__':
    main()
