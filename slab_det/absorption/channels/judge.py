"""Judge: which share of the AP students retain, on images that they are not fitted on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from itertools import chain

import torch
from mmdet.structures import DetDataSample
from torch import Tensor, nn

from slab_det.absorption.absorption_report import AbsorptionReport
from slab_det.absorption.images import NTH_HELD_OUT, WHOLE, Images, fewer_objects, is_held_out
from slab_det.common.errors import ComparisonError
from slab_det.common.modules import given_features
from slab_det.compare.detections import Detections, detect_prepared
from slab_det.compare.ruler import RetainedAP, retained_ap

# Drafts are compared on images of this many pixels, or on this many crops of large images: a crop takes a full-size
# detector a second of a core or more, and prices need a dozen drafts.
JUDGED_PIXELS, JUDGED_CROPS = 100 * 224 * 224, 20
# Batches that drafts are compared on at least.
LEAST_JUDGED = 10


class Judge:
    """Estimates without labels which share of the teacher's AP a student retains.

    Students do better on the images that they are fitted on, so a student is judged on other images. From large images
    the judge takes the same crops as the fits.

    Args:
        teacher: In eval mode.
        images: The images.

    Attributes:
        held_out: The batches that are held out from the fits of students; all where there are fewer than five.
        batches: Those that drafts are compared on.
    """

    def __init__(self, teacher: nn.Module, images: Images) -> None:
        self.teacher, self.images = teacher, images
        self.held_out = [batch for batch in range(images.count) if is_held_out(batch)] or [*range(images.count)]
        first, whole = images.store.get('0'), images.store.get(str(WHOLE))
        most = JUDGED_PIXELS // first[:, 0].numel() if first.shape == whole.shape else JUDGED_CROPS
        self.batches = range(min(images.count, max(LEAST_JUDGED, most)))
        self._found: dict[tuple[int, bool], list[Detections]] = {}

    @property
    def can_compare(self) -> bool:
        """Whether the teacher makes detections that can be compared."""
        with suppress(ComparisonError):
            return bool(self.find(self.held_out[0]))
        return False

    def find(self, batch: int, mirrored: bool = False) -> list[Detections]:
        """The teacher's detections in the images of a batch, or in the mirrored images, mirrored back."""
        # mmdet pastes masks only in float32.
        if not hasattr(self.teacher, 'data_preprocessor') or next(self.teacher.parameters()).dtype == torch.float64:
            raise ComparisonError('the model is no detector, or in float64')
        if (batch, mirrored) not in self._found:
            self._found[batch, mirrored] = self._detect(self.teacher, batch, mirrored)
        return self._found[batch, mirrored]

    def count_detections(self, batches: Iterable[int]) -> int:
        """The number of the teacher's detections in some batches."""
        return sum(len(found.scores) for batch in batches for found in self.find(batch))

    def measure(self, students: Mapping[int, nn.Module], same_maps: bool = False) -> RetainedAP:
        """Estimates the share of the AP that students retain together, each on its batches.

        Args:
            students: The student of each batch, by the index of the batch.
            same_maps: Whether their backbones and necks compute what the teacher's do; then the teacher's run once for
                all students.

        Raises:
            ComparisonError: As :func:`retained_ap` does.
        """
        truth = [*chain(*(self.find(batch, mirrored=True) for batch in students))]
        teacher = [*chain(*map(self.find, students))]
        found = []
        for batch, student in students.items():
            with given_features(student, self._read_maps(batch)) if same_maps else nullcontext():
                found += self._detect(student, batch)
        return retained_ap(truth, teacher, found)

    def _read_maps(self, batch: int) -> tuple[Tensor, ...]:
        store, name = self.images.store, f'maps_{batch}'
        if name not in store.values:
            with torch.no_grad():
                store.put(name, self.teacher.extract_feat(store.get(str(batch))))
        return store.get(name)

    def drop_maps(self) -> None:
        """Frees what ``same_maps`` stored."""
        for batch in self.batches:
            self.images.store.drop(f'maps_{batch}')

    def fill(self, report: AbsorptionReport, student: nn.Module) -> None:
        """Adds the share of a student to its report, if the teacher's detections can be compared."""
        if not self.can_compare:
            return
        report.held_out = self.images.count >= NTH_HELD_OUT
        report.num_images = sum(len(self.find(batch)) for batch in self.held_out)
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
        with fewer_objects(model, self.images.shares[batch]):
            return detect_prepared(model, [(inputs, samples)], mirrored)
