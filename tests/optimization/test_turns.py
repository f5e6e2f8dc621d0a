"""Quick forms are compared on all held-out images, slow ones on as many as fit into seconds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from mmdet.structures import DetDataSample
from mmengine.structures import InstanceData
from torch import empty

from slab_det.compare.detections import as_detections
from slab_det.inference.forms import BASE, Form
from slab_det.optimization import turns as module
from slab_det.optimization.choice import QUARTILE_ROUNDS, SURE_ROUNDS
from slab_det.optimization.records import TRUTH, Records
from slab_det.optimization.turns import LOOK_SECONDS, Turns

OTHER, IMAGES = Form('torch'), 20
NOTHING = DetDataSample(pred_instances=InstanceData(bboxes=empty(0, 4), scores=empty(0), labels=empty(0).long()))


class Clock:
    """Runs forms that take some seconds for an image, by a time that passes in no other way."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, seconds: float, deadline: float = 1e6) -> None:
        self.now = 0.0
        monkeypatch.setattr(module, 'time', SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(module, 'PAUSE_SECONDS', 0)
        monkeypatch.setattr(module, 'detect', lambda *_, **__: [as_detections(self.predict(seconds))])
        monkeypatch.setattr(Turns, 'load', lambda *_: None)
        records = Records(folder, {})
        images = SimpleNamespace(
            contents=dict.fromkeys(range(IMAGES), b''),
            shapes=dict.fromkeys(range(IMAGES), (8, 8)),
            load=lambda image: None,
        )
        self.turns = Turns(None, records, images, 'cpu', 1, deadline, False)

        class Served:
            model = None

            def __call__(_, content: bytes) -> DetDataSample:
                return self.predict(seconds)

        for form in (BASE, OTHER):
            self.turns.served[form.key], self.turns.warm[form.key] = Served(), set()

    def predict(self, seconds: float) -> DetDataSample:
        self.now += seconds
        return NOTHING

    def seen(self, form: Form) -> int:
        return len(self.turns.records.found[form.key])


def test_a_quick_form_is_compared_on_all_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, tmp_path, 0.02)
    clock.turns.run([OTHER], 5)
    assert clock.seen(BASE) == clock.seen(OTHER) == len(clock.turns.records.found[TRUTH]) == IMAGES
    # Looking is no round, and ten rounds take a second.
    assert clock.turns.records.count(OTHER.key) == clock.turns.records.count(BASE.key) == QUARTILE_ROUNDS
    lines = len(clock.turns.records.rounds)
    assert lines == IMAGES + QUARTILE_ROUNDS
    clock.turns.run([OTHER], QUARTILE_ROUNDS + 1)
    assert len(clock.turns.records.rounds) == lines + 1, 'no image is looked at again'


def test_a_slow_form_looks_at_few_images_for_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, tmp_path, 3.0)
    clock.turns._look([BASE.key, OTHER.key])
    # Three predictions an image, one of them mirrored, in the seconds of two forms.
    assert clock.seen(BASE) == clock.seen(OTHER) == -(-2 * LOOK_SECONDS // 9) == 2
    clock.turns.run([OTHER], 5)
    assert clock.seen(BASE) == clock.seen(OTHER) > 5, 'rounds show a form further images'
    assert clock.turns.records.count(OTHER.key) == 5, 'further rounds would take long'


def test_nothing_is_looked_at_after_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, tmp_path, 0.02, deadline=0.1)
    clock.turns.run([OTHER], 5)
    # What was loaded in time gets its rounds.
    assert clock.seen(OTHER) == clock.turns.records.count(OTHER.key) + 2 == SURE_ROUNDS + 2


def test_forms_that_do_not_load_cost_no_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, absent = Clock(monkeypatch, tmp_path, 3.0).turns, Form('onnxruntime')
    turns.run([OTHER], 5)
    lines = len(turns.records.rounds)
    turns.run([absent], 5)
    assert len(turns.records.rounds) == lines, 'the original detector ran alone'
    # Not as many as the absent form lacks.
    turns.run([OTHER, absent], 6)
    assert turns.records.count(OTHER.key) == turns.records.count(BASE.key) == 6


def test_a_form_that_fails_while_it_looks_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, tmp_path, 0.02)

    def fail(content: bytes) -> None:
        raise RuntimeError('no such kernel')

    clock.turns.served[OTHER.key] = fail
    clock.turns.run([OTHER], 5)
    assert clock.turns.records.failed == {OTHER.key: 'no such kernel'} and clock.seen(BASE) == IMAGES
    assert OTHER.key not in clock.turns.records.found and clock.turns.records.count(BASE.key) == QUARTILE_ROUNDS


def test_a_detector_is_loaded_for_its_ap_after_the_deadline_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Clock(monkeypatch, tmp_path, 0.02, deadline=0).turns
    turns.served.clear()
    turns.variants = SimpleNamespace(steps=lambda form: [])
    monkeypatch.setattr(Turns, '_load', lambda self, form: self.served.update({form.key: SimpleNamespace(model=form)}))
    turns._make(OTHER, is_required=False)
    assert not turns.served
    assert turns.load_model(OTHER) == OTHER
