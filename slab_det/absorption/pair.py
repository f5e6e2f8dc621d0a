"""The teacher and the student of an absorption, block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from slab_det.absorption.absorption_report import AbsorptionReport, ChannelAbsorption
from slab_det.absorption.images import Images
from slab_det.absorption.moments import CrossMoments
from slab_det.absorption.regression import Split
from slab_det.absorption.walk import Probe, Walk
from slab_det.common.memory import release_memory
from slab_det.fusion.channels import ChannelUnit, find_channels
from slab_det.fusion.fusion_report import NormFusion


class Pair:
    """Runs teacher and student on all batches, for the fits of a block.

    Args:
        teacher: Walks through the teacher.
        student: Walks through the student.
        images: The batches.
        fusions: The layers that each norm is folded into if it is absorbed, by the name of the norm.
        counts: Number of channels to leave in each unit that loses some, by its name.
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
        counts: Mapping[str, int],
        int8: bool,
        report: AbsorptionReport,
    ) -> None:
        self.teacher, self.student, self.images, self.fusions = teacher, student, images, fusions
        self.counts, self.int8, self.report = counts, int8, report
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

    def run_teacher(self, batch: int, *probes: Probe) -> list[Tensor]:
        """The teacher's tensors."""
        # No fit changes the teacher's output.
        return self.teacher.run(batch, self._block, probes, self._finish(self.teacher, batch))

    def run_student(self, batch: int, *probes: Probe) -> list[Tensor]:
        """The student's tensors."""
        return self.student.run(batch, self._block, probes, self._finish_student(batch))

    def run_teachers_head(self, batch: int, probes: Sequence[Probe]) -> list[list[Tensor]]:
        """The tensors of every call of each probe in a head of the teacher."""
        return self._run_head(self.teacher, batch, probes, self._finish(self.teacher, batch))

    def run_students_head(self, batch: int, probes: Sequence[Probe]) -> list[list[Tensor]]:
        """The tensors of every call of each probe in a head of the student."""
        return self._run_head(self.student, batch, probes, self._finish_student(batch))

    def position_weights(self, batch: int, level: int) -> Tensor | None:
        """The weights of a level of a head of positions; None for a head of regions."""
        return self.images.regions[batch].position_weights(self._block, level)

    def find_pruned(self, name: str) -> tuple[ChannelUnit, int] | None:
        """The unit with this name and the number of channels to leave in it; None if it loses none.

        Adds to the report why it cannot lose any.
        """
        unit = find_channels(self.model)[name]
        kept = self.counts.get(name, unit.count)
        if not unit.reason and kept < unit.count:
            return unit, kept
        # Queries and keys are a step of the same unit, before the step of the values.
        if unit.reason and all(other.unit != name for other in self.report.channels):
            self.report.channels.append(ChannelAbsorption(name, reason=unit.reason))
        return None

    def differs(self) -> bool:
        """Whether the student already differs from the teacher, so that a writer has something to correct."""
        return bool(self.report.pruned or self.report.norms)

    def empty_moments(self) -> Split:
        """Sums without a token."""
        return Split(CrossMoments(self.int8), CrossMoments(self.int8))

    def _run_head(self, walk: Walk, batch: int, probes: Sequence[Probe], finish: str) -> list[list[Tensor]]:
        # A head of regions is called once, so its run ends at the probes.
        if self.position_weights(batch, 0) is None:
            return [[tensor] for tensor in walk.run(batch, self._block, probes, finish)]
        return walk.run_calls(batch, self._block, probes, finish)

    def _finish_student(self, batch: int) -> str:
        # The student's output is not final before the fit, so its module is finished in a run for the fit only if no
        # other block reads the values: then the shape of the output is enough.
        is_read = any(self._block in names for names in self.student.reads.values())
        return '' if is_read or self._finishes != self._block else self._finish(self.student, batch)

    def _finish(self, walk: Walk, batch: int) -> str:
        if (walk.name, batch) in self._finished:
            return ''
        self._finished.add((walk.name, batch))
        return self._finishes
