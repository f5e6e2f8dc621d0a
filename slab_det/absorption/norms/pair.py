"""The teacher and the student of an absorption of norms, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor, nn

from slab_det.absorption.absorption_report import AbsorptionReport
from slab_det.absorption.images import Images
from slab_det.absorption.moments import CrossMoments
from slab_det.absorption.norms.walk import Walk
from slab_det.absorption.probes import Probe
from slab_det.absorption.regression import Split
from slab_det.common.memory import release_memory
from slab_det.fusion.folding import NormFusion


class Pair:
    """Runs teacher and student on all batches, for the fits of a block.

    Args:
        teacher: Walks through the teacher.
        student: Walks through the student.
        images: The batches.
        fusions: The layers that each norm is folded into if it is absorbed, by the name of the norm.
        maps: See :func:`slab_det.absorption.norms.blocks.absorb_norms`.
        int8: See :func:`slab_det.absorb`.
        report: Report of the steps so far; steps add to it.

    Attributes:
        model: The student, which steps change.
    """

    def __init__(
        self,
        teacher: Walk,
        student: Walk,
        images: Images,
        fusions: Mapping[str, NormFusion],
        maps: Mapping[str, Tensor],
        int8: bool,
        report: AbsorptionReport,
    ) -> None:
        self.teacher, self.student, self.images, self.fusions = teacher, student, images, fusions
        self.maps, self.int8, self.report = maps, int8, report
        self.model: nn.Module = student.model
        self._block = self._finishes = ''
        # The walks and batches that have finished what the step finishes.
        self._finished: set[tuple[str, int]] = set()

    def begin(self, block: str, finishes: str) -> None:
        """Begins a step of a block, which finishes a module, or none ('')."""
        self._block, self._finishes = block, finishes
        self._finished.clear()

    def end(self) -> None:
        """Ends a step: runs teacher and student where they have not finished the module in the runs of the fit."""
        for batch in self.batches() if self._finishes else ():
            for walk in (self.teacher, self.student):
                if (walk.name, batch) not in self._finished:
                    walk.run(batch, self._block, finish=self._finishes)

    def finish(self, blocks: Iterable[str]) -> None:
        """Runs blocks whose fits are done."""
        for batch in self.batches() if blocks else ():
            for block in blocks:
                for walk in (self.teacher, self.student):
                    walk.run(batch, block, finish=block)

    def batches(self) -> Iterator[int]:
        """Yields the indices of all batches."""
        release_memory()
        yield from range(self.images.count)

    def run_teacher(self, batch: int, probe: Probe) -> Tensor:
        """The teacher's tensor."""
        # No fit changes the teacher's output.
        (found,) = self.teacher.run(batch, self._block, [probe], self._finish(self.teacher, batch))
        return found

    def run_student(self, batch: int, *probes: Probe) -> list[Tensor]:
        """The student's tensors."""
        return self.student.run(batch, self._block, probes, self._finish_student(batch))

    def differs(self) -> bool:
        """Whether the student already differs from the teacher, so that a layer has something to correct."""
        return bool(self.report.pruned or self.report.norms)

    def empty_moments(self) -> Split:
        """Sums without a token."""
        return Split(CrossMoments(self.int8), CrossMoments(self.int8))

    def _finish_student(self, batch: int) -> str:
        # Before the fit the student's output is not final. The module may still be finished in a run for the fit if no
        # other block reads its values: then only the shape of the output is used.
        is_read = any(self._block in names for names in self.student.reads.values())
        return '' if is_read or self._finishes != self._block else self._finish(self.student, batch)

    def _finish(self, walk: Walk, batch: int) -> str:
        if (walk.name, batch) in self._finished:
            return ''
        self._finished.add((walk.name, batch))
        return self._finishes
