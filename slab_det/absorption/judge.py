"""Judge: which share of the AP students retain, on the images that they are fitted on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from functools import cached_property

import torch
from mmdet.structures import DetDataSample
from torch import Tensor, nn

from slab_det.absorption.absorption_report import AbsorptionReport
from slab_det.absorption.images import HELD_OUT, Images
from slab_det.common.errors import ComparisonError
from slab_det.compare.detections import Detections, detect_prepared
from slab_det.compare.ruler import RetainedAP, retained_ap


class Judge:
    """Estimates without labels which share of the teacher's AP a student retains.

    It takes all images, because the estimate from a fifth of a hundred is too noisy, and closed-form fits hardly prefer
    the images that they are fitted on. Of large images it takes the crops that the fits read.

    Args:
        teacher: In eval mode.
        images: The images.
    """

    def __init__(self, teacher: nn.Module, images: Images) -> None:
        self.teacher, self.images = teacher, images

    @property
    def can_compare(self) -> bool:
        """Whether the teacher makes detections that can be compared."""
        with suppress(ComparisonError):
            return bool(self.found)
        return False

    @cached_property
    def found(self) -> list[Detections]:
        """The teacher's detections in each image."""
        # mmdet pastes masks only in float32.
        if not hasattr(self.teacher, 'data_preprocessor') or next(self.teacher.parameters()).dtype == torch.float64:
            raise ComparisonError('the model is no detector, or in float64')
        return detect_prepared(self.teacher, self._batches())

    @cached_property
    def truth(self) -> list[Detections]:
        """The teacher's detections in the mirrored images, mirrored back."""
        return detect_prepared(self.teacher, self._batches(), mirrored=True)

    def measure(self, student: nn.Module) -> RetainedAP:
        """Estimates the share of the AP that a student retains; raises as :func:`retained_ap`."""
        return retained_ap(self.truth, self.found, detect_prepared(student, self._batches()))

    def describe(self, student: nn.Module, report: AbsorptionReport) -> None:
        """Adds the share to a report, if the teacher's detections can be compared."""
        if not self.can_compare:
            return
        report.held_out = self.images.count >= HELD_OUT
        report.num_images, report.num_detections = len(self.found), sum(len(each.scores) for each in self.found)
        with suppress(ComparisonError):  # the teacher finds nothing, or nothing again
            retained = self.measure(student)
            report.retained_ap = retained.value
            report.retained_ap_error = retained.error if math.isfinite(retained.error) else None

    def _batches(self) -> Iterator[tuple[Tensor, list[DetDataSample]]]:
        for index, samples in self.images.samples.items():
            inputs = self.images.store.get(str(index))
            if inputs.ndim != 4 or len(samples) != len(inputs):
                raise ComparisonError('only detections in single images can be compared')
            # A forward writes its predictions into the samples.
            yield inputs, [DetDataSample(metainfo=sample.metainfo) for sample in samples]
