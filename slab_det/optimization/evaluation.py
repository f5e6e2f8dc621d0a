"""Evaluation: the AP of forms on the labelled images of a config."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mmdet.registry import DATASETS
from mmengine.config import Config
from torch import nn

from slab_det.common.errors import DataError
from slab_det.common.mute import mute_stdout
from slab_det.compare.ruler import ASSUMED_AP, GROUPS
from slab_det.inference.forms import BASE, Form
from slab_det.measure.evaluate import evaluate_groups
from slab_det.measure.report_file import describe_dataset, main_column
from slab_det.optimization.records import Records
from slab_det.preflight import check_evaluation
from slab_det.runtime.registries import enter_scope


class Evaluation:
    """Measures AP of the original detector and of other forms, on ``val_dataloader`` of the config.

    Args:
        cfg: The config.
        records: Keeps what was measured, for each set of labels.
        load: Returns the detector of a form.
        say: Prints a line.

    Attributes:
        found: What was measured of each form, by its key: see :func:`slab_det.measure.evaluate.evaluate`.
        parts: For the jackknife: the AP with one group of images left out, for each group; by form and by kind of AP.
    """

    def __init__(
        self, cfg: Config, records: Records, load: Callable[[Form], nn.Module], say: Callable[[str], None]
    ) -> None:
        self.cfg, self.records, self.load, self.say = cfg, records, load, say
        self.found: dict[str, dict] = {}
        self.parts: dict[str, dict[str, list[float]]] = {}

    @property
    def ap(self) -> float:
        """The AP of the original detector, in [0, 1]; an assumption where it was not measured."""
        kinds = self.found.get(BASE.key, {})
        return max((values[main_column(kind)] for kind, values in kinds.items()), default=ASSUMED_AP)

    def losses(self, key: str) -> tuple[float, float, float] | None:
        """The measured loss of AP of a form and its range, in points; None where it was not measured.

        Of boxes and masks, it is the larger loss. The range is two standard errors, which the choice of images causes:
        those of a jackknife of the difference of both detectors, as in
        :func:`~slab_det.compare.ruler.retained_ap`.
        """
        if key not in self.found:
            return None
        losses = []
        for kind, before in self.found[BASE.key].items():
            loss = before[main_column(kind)] - self.found[key][kind][main_column(kind)]
            parts = np.subtract(self.parts[BASE.key][kind], self.parts[key][kind])
            # One image says nothing.
            error = 1.0
            if len(parts):
                error = 2 * np.sqrt((len(parts) - 1) / len(parts) * np.square(parts - parts.mean()).sum())
            losses.append((100 * loss, 100 * (loss - error), 100 * (loss + error)))
        return tuple(map(float, max(losses)))

    def measure_base(self, detector: nn.Module) -> None:
        """Checks the validation set, and measures the original detector.

        Raises:
            ConfigError: If the config has no validation set.
            DataError: If the validation set is not of the detector's classes, or there is no AP, or an AP of 0.
        """
        check_evaluation(self.cfg, detector.dataset_meta, 'the checkpoint')
        enter_scope(self.cfg)
        dataset = DATASETS.build(self.cfg.val_dataloader.dataset)
        labels = Path(describe_dataset(dataset)['ann_file'])
        digest = hashlib.sha256(labels.read_bytes() if labels.is_file() else str(labels).encode()).hexdigest()
        measured = self.records.state['ap'].setdefault(digest, dict(found={}, parts={}))
        self.found, self.parts = measured['found'], measured['parts']
        self.measure(BASE)
        if not self.ap:
            raise DataError(
                'the original detector has an AP of 0 on the validation images of the config, so there is nothing to '
                'lose: check that they hold its classes, or leave eval out'
            )

    def measure(self, form: Form) -> None:
        """Measures AP of a form, where that was not done yet; also after the deadline."""
        if form.key in self.found:
            return
        start = time.monotonic()
        # The tables of the evaluators, one for boxes and one for masks.
        with mute_stdout():
            found, parts = evaluate_groups(self.load(form), self.cfg, GROUPS)
        # mmdet measures nothing where nothing is found; the original detector has found something.
        found = {kind: found.get(kind, {main_column(kind): 0.0}) for kind in self.found.get(BASE.key, found)}
        if not found:
            raise DataError(
                'the original detector finds nothing in the validation images of the config, or val_evaluator has no '
                'CocoMetric: correct the config, or leave eval out'
            )
        # Without the group, nothing may be found.
        self.parts[form.key] = {
            kind: [part[kind][main_column(kind)] if kind in part else 0.0 for part in parts] for kind in found
        }
        self.found[form.key] = found
        self.records.save()
        self.say(f'AP of {form.title}, on the validation images: {time.monotonic() - start:.0f} s')
