"""Differences of outputs and of detections, and which of them are accepted."""

import math

import pytest
import torch

from slab_det.compare.difference import (
    Comparison,
    accepted_difference,
    match_detections,
    relative_difference,
    rms_difference,
)


@pytest.mark.parametrize('measure', [rms_difference, lambda x, y: relative_difference([y, x], [y, y])])
def test_difference_of_maps(measure):
    x = torch.randn(3, 4)
    assert measure(x, x) == measure(0 * x, 0 * x) == measure(x[:0], x[:0]) == 0
    assert measure(1.5 * x, x) == pytest.approx(0.5)
    assert measure(x[:2], x) == measure(x / 0, x) == measure(x, x / 0) == math.inf
    assert measure(torch.full((2,), math.nan), torch.ones(2)) == math.inf


def test_one_wrong_value_shows_in_the_largest_difference():
    x = torch.ones(100, 100)
    y = x.clone()
    y[3, 5] = 1.5
    assert relative_difference([y], [x]) == 0.5 and rms_difference(y, x) == pytest.approx(0.005)
    with pytest.raises(ValueError, match='zip'):
        relative_difference([y, y], [x])


@pytest.mark.parametrize(
    ('dtype', 'rounding', 'bound'),
    [
        (torch.float32, 1e-5, 1e-4),
        (torch.bfloat16, 0.01, 0.04),
        (torch.float16, 0.01, 0.04),
        (torch.float32, 0.0, 10 * 2**-25),
        (torch.bfloat16, 0.0, 2**-7),
    ],
)
def test_accepted_is_a_multiple_of_rounding(dtype, rounding, bound):
    assert accepted_difference(rounding, dtype) == pytest.approx(bound)


@pytest.mark.parametrize(
    ('num_values', 'difference', 'bound', 'same'),
    [(9, 0.1, 0.2, True), (9, 0.2, 0.1, False), (0, 0.0, 0.1, False), (9, math.inf, math.inf, False)],
    ids=['rounding', 'more', 'nothing', 'not finite'],
)
def test_models_are_the_same_if_rounding_explains_the_difference_of_something(num_values, difference, bound, same):
    check = Comparison('feature maps', num_values, difference, bound / 10, bound)
    assert check.same is same and str(num_values) in str(check)


def test_detections_match_the_nearest_of_the_same_class():
    boxes = torch.tensor([[0.0, 0, 10, 10], [5, 5, 20, 20], [50, 60, 80, 90]])
    scores, labels = torch.tensor([0.9, 0.8, 0.7]), torch.tensor([0, 1, 1])
    order = torch.tensor([2, 0, 1])
    first, second = [boxes, scores, labels], [(boxes + 1e-3)[order], scores[order] - 1e-5, labels[order]]
    *pair, unmatched = match_detections(first, second, 100)
    assert unmatched == 0 and len(pair[0][0]) == 3
    assert relative_difference(*pair) == pytest.approx(1e-5, rel=0.5)
    # One of fewer than 50 detections is 2 %.
    second[2] = torch.tensor([1, 1, 1])
    *pair, unmatched = match_detections(first, second, 100)
    assert unmatched == 0.02 and pair[0][1].tolist() == pair[0][1][:2].tolist()
    *pair, unmatched = match_detections(first, [x[:0] for x in second], 100)
    assert unmatched == pytest.approx(0.06) and not len(pair[0][0])
