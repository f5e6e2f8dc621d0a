"""The teacher and the student of an absorption of norms, block by block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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
        block: The block whose steps are fitted. Those before it are finished.
        is_last: Whether the step is the last one before the block is finished.
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
        self.block, self.is_last = '', False

    def finish(self, blocks: Sequence[str]) -> None:
        """Finishes blocks whose fits are done."""
        for batch in self.batches() if blocks else ():
            for block in blocks:
                for walk in (self.teacher, self.student):
                    walk.finish(batch, block)

    def batches(self) -> Iterator[int]:
        """Yields the indices of all batches."""
        release_memory()
        yield from range(self.images.count)

    def run_teacher(self, batch: int, probe: Probe) -> Tensor:
        """The teacher's tensor."""
        # No fit changes the teacher's output.
        (found,) = self.teacher.run(batch, self.block, [probe], finish=self.is_last)
        return found

    def run_student(self, batch: int, *probes: Probe) -> list[Tensor]:
        """The student's tensors."""
        return self.student.run(batch, self.block, probes)

    def differs(self) -> bool:
        """Whether the student already differs from the teacher, so that a layer has something to correct."""
        return bool(self.report.pruned or self.report.norms)

    def empty_moments(self) -> Split:
        """Sums without a token."""
        return Split(CrossMoments(self.int8), CrossMoments(self.int8))
