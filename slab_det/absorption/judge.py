"""Judge: which share of the AP students retain, on images that they are not fitted on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from itertools import chain

import torch
from mmdet.structures import DetDataSample
from torch import nn

from slab_det.absorption.absorption_report import AbsorptionReport
from slab_det.absorption.images import HELD_OUT, Images, is_held_out
from slab_det.common.errors import ComparisonError
from slab_det.compare.detections import Detections, detect_prepared
from slab_det.compare.ruler import RetainedAP, retained_ap


class Judge:
    """Estimates without labels which share of the teacher's AP a student retains.

    Students do better on the images that they are fitted on, so every student is shown others. Of large images it sees
    the crops that fits read.

    Args:
        teacher: In eval mode.
        images: The images.
    """

    def __init__(self, teacher: nn.Module, images: Images) -> None:
        self.teacher, self.images = teacher, images
        held_out = [batch for batch in range(images.count) if is_held_out(batch)]
        self.held_out = held_out or [*range(images.count)]

    @property
    def can_compare(self) -> bool:
        """Whether the teacher makes detections that can be compared."""
        with suppress(ComparisonError):
            return bool(self.found)
        return False

    @cached_property
    def found(self) -> dict[int, list[Detections]]:
        """The teacher's detections in the images of each batch, by its index."""
        # mmdet pastes masks only in float32.
        if not hasattr(self.teacher, 'data_preprocessor') or next(self.teacher.parameters()).dtype == torch.float64:
            raise ComparisonError('the model is no detector, or in float64')
        return {batch: self._detect(self.teacher, batch) for batch in range(self.images.count)}

    @cached_property
    def truth(self) -> dict[int, list[Detections]]:
        """The teacher's detections in the mirrored images, mirrored back."""
        return {batch: self._detect(self.teacher, batch, mirrored=True) for batch in range(self.images.count)}

    def count_detections(self, batches: Iterable[int]) -> int:
        """The number of the teacher's detections in some batches."""
        return sum(len(found.scores) for batch in batches for found in self.found[batch])

    def measure(self, students: Mapping[int, nn.Module]) -> RetainedAP:
        """Estimates the share of the AP that students retain together, each on its batches.

        Args:
            students: The student of each batch, by the index of the batch.

        Raises:
            ComparisonError: As :func:`retained_ap` does.
        """
        batches = [*students]
        truth, teacher = ([*chain(*map(part.get, batches))] for part in (self.truth, self.found))
        return retained_ap(truth, teacher, [*chain(*(self._detect(students[batch], batch) for batch in batches))])

    def describe(self, student: nn.Module, report: AbsorptionReport) -> None:
        """Adds the share to a report, if the teacher's detections can be compared."""
        if not self.can_compare:
            return
        report.held_out = self.images.count >= HELD_OUT
        report.num_images = sum(len(self.found[batch]) for batch in self.held_out)
        report.num_detections = self.count_detections(self.held_out)
        with suppress(ComparisonError):  # the teacher finds nothing, or nothing again
            retained = self.measure(dict.fromkeys(self.held_out, student))
            report.retained_ap = retained.value
            report.retained_ap_error = retained.error if math.isfinite(retained.error) else None

    def _detect(self, model: nn.Module, batch: int, mirrored: bool = False) -> list[Detections]:
        inputs, samples = self.images.store.get(str(batch)), self.images.samples[batch]
        if inputs.ndim != 4 or len(samples) != len(inputs):
            raise ComparisonError('only detections in single images can be compared')
        # A forward writes its predictions into the samples.
        samples = [DetDataSample(metainfo=sample.metainfo) for sample in samples]
        return detect_prepared(model, [(inputs, samples)], mirrored)
