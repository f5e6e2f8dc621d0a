"""Evaluation: the AP of forms on the labelled images of a config."""

from __future__ import annotations

import hashlib
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from mmdet.registry import DATASETS
from mmengine.config import Config
from torch import nn

from slab_det.compare.agreement import ASSUMED_AP
from slab_det.inference.forms import Form
from slab_det.measure.evaluate import evaluate
from slab_det.measure.report_file import describe_dataset, main_column
from slab_det.optimization.records import Records
from slab_det.optimization.turns import BASE, Turns
from slab_det.preflight import check_class_order, check_data, classes_of_meta
from slab_det.runtime.errors import ConfigError, DataError
from slab_det.runtime.registries import enter_scope


class Evaluation:
    """Measures AP of the original detector and of other forms, on ``val_dataloader`` of the config.

    Args:
        cfg: The config.
        records: Keeps what was measured.
        turns: Loads the forms.

    Attributes:
        found: What was measured of each form, by its key.
    """

    def __init__(self, cfg: Config, records: Records, turns: Turns) -> None:
        self.cfg, self.records, self.turns = cfg, records, turns
        self.found: dict[str, dict] = records.state.setdefault('ap', {})

    @property
    def ap(self) -> float:
        """The AP of the original detector, in [0, 1]; an assumption where it was not measured."""
        kinds = self.found.get(BASE.key, {})
        return max((values[main_column(kind)] for kind, values in kinds.items()), default=ASSUMED_AP)

    def loss(self, key: str) -> float | None:
        """The loss of AP of a form in points, the largest of boxes and masks; None where it was not measured."""
        if key not in self.found:
            return None
        before, after = self.found[BASE.key], self.found[key]
        return 100 * max(before[kind][main_column(kind)] - after[kind][main_column(kind)] for kind in before)

    def measure_base(self, detector: nn.Module) -> None:
        """Checks the validation set, drops what was measured on another one, and measures the original detector.

        Args:
            detector: The original detector.

        Raises:
            ConfigError: If the config has no validation set, or none that measures AP.
            DataError: If the validation set is not of the detector's classes, or AP is 0.
        """
        if not (self.cfg.get('val_dataloader') and self.cfg.get('val_evaluator')):
            raise ConfigError('eval needs a config with val_dataloader and val_evaluator; add them, or leave eval out')
        check_data(self.cfg, ('val',))
        check_class_order(self.cfg, 'val', classes_of_meta(vars(detector)) or (), 'the checkpoint')
        enter_scope(self.cfg)
        dataset = DATASETS.build(self.cfg.val_dataloader.dataset)
        labels = Path(describe_dataset(dataset)['ann_file'])
        digest = hashlib.sha256(labels.read_bytes() if labels.is_file() else str(labels).encode()).hexdigest()
        if self.records.state.get('labels') != digest:
            self.records.state['labels'] = digest
            self.found.clear()
        self.measure(BASE)
        if not self.ap:
            raise DataError(
                'the original detector has an AP of 0 on the validation images of the config, so there is nothing to '
                'lose: check that they hold its classes, or leave eval out'
            )

    def measure(self, form: Form) -> None:
        """Measures AP of a form, where that was not done yet; its time is not part of the budget."""
        if form.key in self.found:
            return
        self.turns.say(f'AP of {form.title}, on the validation images of the config')
        # The tables of the evaluators, one for boxes and one for masks.
        with self.turns.budget.pause(), redirect_stdout(StringIO()):
            self.turns.load([form], required=True)
            self.found[form.key] = evaluate(self.turns.served[form.key].model, self.cfg)
        if not self.found[form.key]:
            raise ConfigError('--eval: val_evaluator of the config measures no COCO AP; give a CocoMetric')
        self.records.save()
