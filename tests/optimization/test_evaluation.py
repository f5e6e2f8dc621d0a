"""The measured loss of AP has an interval by resampling images."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slab_det.optimization.evaluation import Evaluation


def test_the_loss_has_two_standard_errors_of_a_jackknife() -> None:
    evaluation = Evaluation(None, SimpleNamespace(state={}), None, None)
    assert evaluation.losses('int8') is None
    evaluation.found = dict(
        eager=dict(bbox=dict(AP=0.5), segm=dict(AP=0.4)), int8=dict(bbox=dict(AP=0.49), segm=dict(AP=0.37))
    )
    evaluation.parts = dict(
        eager=dict(bbox=[0.5] * 3, segm=[0.40, 0.44, 0.36]), int8=dict(bbox=[0.5] * 3, segm=[0.37, 0.42, 0.32])
    )
    # Masks lose more, and without each group 3, 2 and 4 points: their mean is 3, and their squares add to 2.
    error = 2 * (2 / 3 * 2) ** 0.5
    assert evaluation.losses('int8') == pytest.approx((3, 3 - error, 3 + error))
    assert evaluation.losses('eager') == (0, 0, 0)
    evaluation.parts['int8'] = evaluation.parts['eager'] = dict(bbox=[], segm=[])
    assert evaluation.losses('int8') == pytest.approx((3, -97, 103)), 'one image says nothing'
