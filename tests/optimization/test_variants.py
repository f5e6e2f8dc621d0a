"""Absorbed detectors are made on the device of the optimization, and written configs load."""

from __future__ import annotations

from pathlib import Path

import pytest
from mmengine.config import Config
from torch import nn

import slab_det
from slab_det.inference.forms import Form
from slab_det.optimization import variants


class Detector(nn.Module):
    """Remembers where it was moved."""

    dataset_meta = None

    def __init__(self) -> None:
        super().__init__()
        self.devices = ['cpu']

    def to(self, device: str) -> Detector:
        self.devices.append(device)
        return self

    def cpu(self) -> Detector:
        return self.to('cpu')


def test_absorption_runs_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    detector, student, seen = Detector(), Detector(), []

    def absorb(model: Detector, *_: object, **__: object) -> Detector:
        seen.append(model.devices[-1])
        student.devices.append(model.devices[-1])
        return student

    saved = []
    monkeypatch.setattr(slab_det, 'absorb', absorb)
    monkeypatch.setattr(variants, 'save_fused', lambda model, *_: saved.append(model.devices[-1]))
    made = variants.Variants(tmp_path, Config(dict(model=dict())), detector, None, 'cuda', False)
    (step,) = made.steps(Form('torch', 'float16', ('channels50',)))
    step.make()
    assert (seen, saved, detector.devices[-1]) == (['cuda'], ['cpu'], 'cpu')


def test_the_written_config_has_names_that_load(tmp_path: Path) -> None:
    # As a Python-style config says it.
    cfg = Config(dict(model=dict(type='RetinaNet', test_cfg=dict(nms=dict(type='mmcv.ops.nms', iou_threshold=0.5)))))
    made = variants.Variants(tmp_path, cfg, Detector(), None, 'cpu', False)
    (step,) = made.steps(Form('eager'))
    step.make()
    config, weights = made.paths(Form('eager'))
    assert Config.fromfile(config).model.test_cfg.nms.type == 'nms' and weights.is_file()
