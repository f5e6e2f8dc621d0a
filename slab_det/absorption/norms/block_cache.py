"""BlockCache: files of finished blocks, from which an interrupted absorption resumes."""

from __future__ import annotations

import io
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor, nn

from slab_det.absorption.absorption_report import AbsorptionReport
from slab_det.absorption.digest import add_weights, teacher_digest
from slab_det.absorption.norms.plan import NormPlan
from slab_det.fusion.folding import apply_fold
from slab_det.runtime import read_checkpoint
from slab_det.runtime.run_folder import AtomicLocalBackend


class BlockCache:
    """The files of a student's finished blocks, each with the weights that the block changed and the report so far.

    The names of the files have a digest of all that determines the fits.

    Args:
        plan: The steps and the images.
        student: The student before the first block.
        folder: Folder of the files.
    """

    def __init__(self, plan: NormPlan, student: nn.Module, folder: Path) -> None:
        self.plan, digest = plan, teacher_digest(plan.teacher, plan.images)
        add_weights(digest, student)
        digest.update(repr((plan.fusions, plan.int8, plan.blocks)).encode())
        stem = f'absorb_{digest.hexdigest()[:16]}'
        self.files = {block: folder / f'{stem}_{index}.pth' for index, block in enumerate(plan.blocks)}
        # The student's weights when they were last saved or loaded.
        self.saved: dict[str, Tensor] = {}

    def load(self, student: nn.Module, report: AbsorptionReport) -> list[str]:
        """Loads the finished blocks into the student and the report, and returns their names."""
        finished = [block for block, _ in takewhile(lambda item: item[1].exists(), self.files.items())]
        weights = {}
        for block in finished:
            state = read_checkpoint(self.files[block])
            weights.update(state['weights'])
            found = AbsorptionReport.from_dict(state['report'])
            report.norms, report.refits = found.norms, found.refits
        for norm in report.norms:
            apply_fold(student, self.plan.fusions[norm.norm])
        student.load_state_dict({**student.state_dict(), **weights})
        self.saved = {name: value.clone() for name, value in student.state_dict().items()}
        return finished

    def save(self, block: str, model: nn.Module, report: AbsorptionReport) -> None:
        """Saves the weights that a block changed and the report so far."""
        changed = {
            name: value.clone()
            for name, value in model.state_dict().items()
            if name not in self.saved or not torch.equal(value, self.saved[name])
        }
        self.saved.update(changed)
        buffer = io.BytesIO()
        torch.save(dict(weights=changed, report=report.to_dict()), buffer)
        AtomicLocalBackend().put(buffer.getvalue(), self.files[block])
