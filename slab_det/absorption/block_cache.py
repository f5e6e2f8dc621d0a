"""BlockCache: files of finished blocks, from which an interrupted absorption resumes."""

from __future__ import annotations

import hashlib
import io
from itertools import takewhile
from pathlib import Path

import torch
from torch import Tensor, nn

import slab_det
from slab_det.absorption.absorption_report import AbsorptionReport
from slab_det.absorption.images import Images, to_bytes
from slab_det.absorption.plan import NormPlan
from slab_det.common.record import describe_environment
from slab_det.fusion.folding import apply_fold
from slab_det.runtime import read_checkpoint
from slab_det.runtime.run_folder import AtomicLocalBackend


class BlockCache:
    """The files of a student's finished blocks, each with the weights that the block changed and the report so far.

    The name of a file is a digest of all that determines the fits up to its block, so absorptions of more or fewer
    norms share the files of the blocks before the first that differs.

    Args:
        plan: The steps and the images.
        student: The student before the first block.
        folder: Folder of the files.
    """

    def __init__(self, plan: NormPlan, student: nn.Module, folder: Path) -> None:
        self.plan, self.files = plan, {}
        digest = teacher_digest(plan.teacher, plan.images)
        _add_weights(digest, student)
        digest.update(repr((plan.fusions, plan.int8)).encode())
        for block, steps in plan.blocks.items():
            digest.update(repr((block, len(steps))).encode())
            self.files[block] = folder / f'absorb_{digest.hexdigest()[:16]}.pth'
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


def teacher_digest(teacher: nn.Module, images: Images) -> hashlib._Hash:
    """Digest of what all fits have in common: the images, the teacher's weights and settings, and the code."""
    digest = images.digest.copy()
    settings = images.count, _settings(teacher), describe_environment()['versions']
    digest.update(repr(settings).encode())
    digest.update(_source_digest(Path(slab_det.__file__).parent))
    _add_weights(digest, teacher)
    return digest


def _add_weights(digest: hashlib._Hash, model: nn.Module) -> None:
    for name, value in model.state_dict().items():
        digest.update(f'{name} {value.dtype} {tuple(value.shape)}'.encode() + to_bytes(value))


def _source_digest(package: Path) -> bytes:
    """Digest of the source of a package: another commit of the same version may make other fits."""
    digest = hashlib.sha256()
    for file in sorted(package.rglob('*.py')):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return digest.digest()


def _settings(model: nn.Module) -> list[tuple]:
    """What modules hold beside weights, such as eps, heads and window sizes: their types, numbers and words."""

    def is_plain(value: object) -> bool:
        return all(map(is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, (int, float, str))

    # Private attributes are caches and flags, which may change between two calls.
    return [
        (name, type(module).__qualname__, key, repr(value))
        for name, module in model.named_modules()
        for key, value in sorted(vars(module).items())
        if not key.startswith('_') and is_plain(value)
    ]
