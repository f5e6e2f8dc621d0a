r"""Leaves out one step of the absorption at a time, and takes fewer images: AP of one teacher with every norm gone.

    python benchmarks/absorb/ablation.py bccd --data-root data/bccd \
        --checkpoint work_dirs/absorb/bccd/seed0/teacher/iter_500.pth

Results are added to benchmarks/results/absorb_ablation_DATASET.json; a row that is there is not measured again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import slab_det  # noqa: F401, I001 (before mmdet: registers everything)

import argparse
import tempfile
from unittest import mock

import torch
from mmengine.config import Config

from benchmarks.absorb.run import CONFIGS, IN_PROCESS, METRICS, ROOT, Cells
from slab_det import runtime
from slab_det.checkpoints.build import build_detector
from slab_det.conversion.regression import diagonal_fit
from slab_det.data import set_data_root
from slab_det.measure.evaluate import evaluate
from slab_det.recalibration import recalibration_dataloader
from slab_det.recalibration.moments import evaluating

# slab_det.conversion.absorb is the function.
MODULE = sys.modules['slab_det.conversion.absorb']


class NoWriters(MODULE._Run):
    """Norms become matrices; writers stay."""

    def _fit_unit(self, unit: int) -> None:
        steps = self.plan.steps[unit]
        self.plan.steps[unit] = [step for step in steps if isinstance(step, str)]
        super()._fit_unit(unit)
        self.plan.steps[unit] = steps


class Diagonal(MODULE._Run):
    """Norms become a scale and a shift per channel; writers are fitted."""

    def _absorb_norm(self, unit: int, name: str) -> object:
        def choose(moments: object, held_out: object, prior: object) -> tuple:
            return diagonal_fit(moments), 0.0

        with mock.patch.object(MODULE, 'choose_fit', choose):
            return super()._absorb_norm(unit, name)


class DiagonalNoWriters(Diagonal, NoWriters):
    """Norms become a scale and a shift per channel; writers stay."""


ROWS = {
    'a scale per channel': (DiagonalNoWriters, 100),
    'a scale per channel, writers fitted': (Diagonal, 100),
    'a matrix': (NoWriters, 100),
    'a matrix, writers fitted': (MODULE._Run, 100),
    'the same, 50 images': (MODULE._Run, 50),
    'the same, 20 images': (MODULE._Run, 20),
    'the same, 10 images': (MODULE._Run, 10),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('dataset', choices=CONFIGS)
    parser.add_argument('--data-root', required=True)
    parser.add_argument('--checkpoint', required=True, help='the teacher')
    parser.add_argument('--seed', type=int, default=0, help='of the teacher (default %(default)s)')
    args = parser.parse_args()
    runtime.install()
    torch.set_num_threads(1)
    cfg = Config.fromfile(ROOT / CONFIGS[args.dataset])
    set_data_root(cfg, args.data_root)
    cfg.val_dataloader.update(IN_PROCESS)
    teacher = build_detector(cfg, args.checkpoint)
    cells = Cells(ROOT / f'benchmarks/results/absorb_ablation_{args.dataset}.json')
    for row, (run, num_images) in ROWS.items():

        def measure(run: type = run, num_images: int = num_images) -> dict:
            images = recalibration_dataloader(cfg, num_images, 'test')
            with evaluating(teacher), tempfile.TemporaryDirectory() as folder:
                student = run(MODULE.AbsorptionPlan(teacher, images, Path(folder)), progress=False).student
            return dict(AP=evaluate(student, cfg)[METRICS[args.dataset]]['AP'])

        cells.measure(row, args.seed, measure)


if __name__ == '__main__':
    main()
