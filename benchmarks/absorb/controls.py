"""Students that show what a teacher needs: without parts of what absorption does, or with less of the backbone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor, nn

import slab_det
from slab_det.absorption.absorption_report import AbsorptionReport
from slab_det.absorption.channels.survey import Survey
from slab_det.absorption.images import read_images
from slab_det.absorption.moments import Affine
from slab_det.absorption.norms.blocks import absorb_norms
from slab_det.absorption.norms.pair import Pair
from slab_det.absorption.norms.plan import plan_norms
from slab_det.absorption.regression import Split


def with_affine_ffns(teacher: nn.Module, images: Iterable) -> nn.Module:
    """Every FFN becomes its best affine map: the layers that write the stream are fitted as always, all norms stay."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(Pair, 'differs', lambda self: True):
        plan = plan_norms(teacher.eval(), read_images(teacher, images, Path(folder)), 'keep')
        student = plan.copy_teacher()
        for module in [*student.backbone.modules()]:
            for name, child in module.named_children():
                if isinstance(child, nn.GELU):
                    setattr(module, name, nn.Identity())
        absorb_norms(plan, student, {}, AbsorptionReport(), Path(folder), progress=False)
        return student


def with_scales_for_norms(teacher: nn.Module, images: Iterable) -> nn.Module:
    """Every norm becomes its best scale and shift per channel, and no other layer is fitted."""

    def keep_prior(split: Split, prior: Tensor) -> Affine:
        return Affine(prior, split.fitted.mean_y - prior @ split.fitted.mean_x)

    with (
        mock.patch.object(Split, 'choose_fit', keep_prior),
        mock.patch.object(Pair, 'differs', lambda self: False),
    ):
        return slab_det.absorb(teacher, images, 1, 'remove', progress=False)


class BlockSurvey(Survey):
    """The units of the backbone's blocks; their multiply-adds are all that is counted."""

    def __init__(self, *args: Any) -> None:
        self.counts: Mapping[str, int] | None = None
        super().__init__(*args)
        self.estimates = {name: found for name, found in self.estimates.items() if name.startswith('backbone.')}
        self.kinds = {kind: self.kinds[kind] for kind in ('attention', 'FFN')}
        self.layers = {layer: value for layer, value in self.layers.items() if layer.startswith('backbone.')}
        self.total = sum(cost for cost, _ in self.layers.values())

    def choose(self, share: float) -> dict[str, int]:
        """See :meth:`Survey.choose`; the fewest channels where these leave more."""
        self.counts = super().choose(max(share, self.least_share() + 1e-6))
        return self.counts

    def count(self, student: nn.Module) -> float:
        """The multiply-adds that are left in the blocks, once they are chosen."""
        return super().count(student) if self.counts is None else self.multiply_adds(self.counts)


def with_thin_blocks(teacher: nn.Module, images: Iterable, share: float) -> nn.Module:
    """Only this share of the blocks' multiply-adds is left, or the least possible; neck, heads and norms stay."""
    with mock.patch.object(import_module('slab_det.absorption.absorption'), 'Survey', BlockSurvey):
        return slab_det.absorb(teacher, images, share, progress=False)
