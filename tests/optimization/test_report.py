"""The verdict says what a form gains and loses, and what channels and norms would have gained."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from slab_det.inference.forms import Form
from slab_det.optimization.choice import Measured, is_faster
from slab_det.optimization.pictures import loss_figure
from slab_det.optimization.report import OptimizationReport


def entry(
    form: Form, ratio: float, loss: float = 0.0, tie: bool = False, ap: float | None = None, rounds: int = 30
) -> dict:
    return dict(
        key=form.key,
        title=form.title,
        runtime=form.runtime,
        precision=form.precision,
        variant=[*form.variant],
        rounds=rounds,
        changes=form.changes,
        median_ms=200 * ratio,
        ratio=ratio,
        quartiles=[ratio - 0.01, ratio + 0.01],
        extremes=[ratio - 0.02, ratio + 0.02],
        retained_ap=1 - loss / 50,
        images=40,
        detections=300,
        expected_loss=loss,
        loss_range=[loss / 2, 2 * loss],
        loss=loss,
        ap_loss=None if ap is None else 100 * (0.4 - ap),
        ap_loss_range=None if ap is None else [39 - 100 * ap, 41 - 100 * ap],
        ap=None if ap is None else dict(bbox=dict(AP=ap)),
        memory_mb=None,
        first_s=1.0,
        disk_mb=10.0,
        tie=tie,
        dropped_for='',
        files=[],
    )


def report(recommended: Form, *entries: dict, **content: object) -> OptimizationReport:
    images = dict(held_out=40, fitted=80, sizes='160x192')
    environment = dict(device='CPU', versions=dict(torch='2'))
    content = dict(failed={}, not_measured=[], max_loss=0.5, ap=0.5, threads=2) | content
    best = next(Measured.from_dict(each) for each in entries if each['key'] == recommended.key)
    entries = [dict(each, faster=is_faster(Measured.from_dict(each), best)) for each in entries]
    forms = sorted(entries, key=lambda each: each['ratio'])
    return OptimizationReport(
        Path('out'), content | dict(recommended=recommended.key, forms=forms, images=images, environment=environment)
    )


EAGER, BFLOAT16 = Form('eager'), Form('openvino', 'bfloat16')
PRUNED = Form('openvino', 'bfloat16', ('channels50',))
ABSORBED = Form('openvino', 'bfloat16', ('channels50', 'norms'))


def test_what_is_gained_and_lost_is_said() -> None:
    found = report(
        BFLOAT16, entry(EAGER, 1.0), entry(BFLOAT16, 0.3, 0.1), entry(PRUNED, 0.2, 0.9), entry(ABSORBED, 0.295, 2)
    )
    verdict = found.verdict()
    assert '**OpenVINO, bfloat16** takes 0.30 (0.29 to 0.31) of the time' in verdict
    assert '60 ms for an image instead of 200 ms' in verdict
    assert 'Its expected loss of AP is 0.10 points (0.05 to 0.20).' in verdict
    assert 'Removing channels would make it faster, and lose 0.9 AP. Nothing is gained here by absorbing' in verdict
    assert 'if the original has an AP of 50' in str(found)
    measured = report(BFLOAT16, entry(EAGER, 1.0, ap=0.4), entry(BFLOAT16, 0.3, 0.1, ap=0.397), ap=0.4)
    assert 'AP on the labelled images changes by -0.3 points (-1.3 to +0.7 at two standard errors' in measured.verdict()
    assert 'for the measured AP of 40' in str(measured) and '| 39.7 |' in measured.table()
    equal = report(BFLOAT16, entry(EAGER, 1.0, ap=0.4), entry(BFLOAT16, 0.3, 0.1, ap=0.4), ap=0.4)
    assert 'changes by +0.0 points (-1.0 to +1.0' in equal.verdict()


def test_a_gain_of_nothing_is_said() -> None:
    found = report(EAGER, entry(EAGER, 1.0, tie=True), entry(BFLOAT16, 0.99, tie=True))
    assert found.verdict().startswith('Nothing is gained here: no form is faster')
    assert 'OpenVINO, bfloat16 *' in found.table() and '* is as fast as the recommended form' in str(found)
    late = report(EAGER, entry(EAGER, 1.0), not_measured=['deployed, float32'])
    assert late.verdict().startswith('No faster form was found in the time')
    lacks = 'needs the package openvino'
    failed = report(
        EAGER, entry(EAGER, 1.0), failed={'openvino': lacks, 'onnxruntime': 'broken', 'openvino-int8': lacks}
    )
    assert 'Not measured: openvino, openvino-int8: needs the package openvino.\n' in str(failed)
    assert str(failed).count(lacks) == 1 and 'Not measured: onnxruntime: broken.' in str(failed)


def test_few_rounds_are_named() -> None:
    few = [
        entry(EAGER, 1.0, tie=True, rounds=4),
        entry(BFLOAT16, 0.3, tie=True, rounds=3),
        entry(PRUNED, 0.2, rounds=3),
    ]
    found = report(EAGER, *few)
    assert found.verdict() == (
        'No faster form was found in the time; the same command goes on. After too few rounds to be called faster or '
        'slower: OpenVINO, bfloat16.'
    )
    assert 'OpenVINO, bfloat16 * (3 rounds) |' in found.table()
    assert 'with fewer than 5, never' in str(found) and 'with fewer than 5' not in str(report(EAGER, entry(EAGER, 1.0)))


def test_no_gain_is_denied_that_more_rounds_or_forms_may_show() -> None:
    # Quartiles lie apart, and extremes do not.
    seems_faster = dict(entry(PRUNED, 0.275, 0.9, rounds=6), extremes=[0.25, 0.3])
    absorbed = entry(ABSORBED, 0.295, 2)
    denied = 'Nothing is gained here by removing channels'
    entries = entry(EAGER, 1.0), entry(BFLOAT16, 0.3, 0.1, rounds=6)
    assert denied not in report(BFLOAT16, *entries, seems_faster, absorbed).verdict()
    slower = entry(PRUNED, 0.31, 0.9)
    assert denied in report(BFLOAT16, *entries, slower).verdict()
    assert denied not in report(BFLOAT16, *entries, slower, not_measured=['eager, 75%']).verdict()


def test_few_detections_are_named() -> None:
    found = report(BFLOAT16, entry(EAGER, 1.0), dict(entry(BFLOAT16, 0.3), detections=12))
    assert 'rests on 12 detections alone**: give more images' in found.verdict()


def test_the_picture_numbers_every_form_and_marks_the_recommended_one() -> None:
    entries = (
        entry(EAGER, 1.0),
        entry(BFLOAT16, 0.3, 0.1),
        entry(PRUNED, 0.301, 0.1, tie=True),
        entry(ABSORBED, 0.3, 9),
    )
    figure: Figure = loss_figure(report(BFLOAT16, *entries).content)
    legend = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert len(legend) == 4 and [text.split()[0] for text in legend] == ['1', '2', '3', '4']
    assert sum(text.endswith(': recommended') for text in legend) == 1
    assert sum(text.endswith(': as fast') for text in legend) == 1
    numbers = [text for text in figure.axes[0].texts if text.get_text().isdigit()]
    places = {text.xyann for text in numbers}
    assert len(numbers) == 4 and len(places) > 1, 'the numbers of two forms at the same place would hide each other'
