"""The pictures of the README and of docs/absorb.md show every way, from the stored results."""

import pytest

from benchmarks import ap_latency
from benchmarks.absorb import figure as absorbed


def test_every_way_is_in_the_picture_of_ap_over_time(tmp_path):
    ap_latency.draw(tmp_path / 'ap.svg')
    picture = (tmp_path / 'ap.svg').read_text()
    for way in ap_latency.WAYS:
        # Once in each panel: two data sets on each machine that has run it.
        assert picture.count(f'>{way.label}<') == 2 * len(way.rows), way.label
    assert all(f'>{label}<' in picture for label in ap_latency.LEGEND if "'" not in label)


def test_labels_keep_their_order_and_do_not_touch():
    placed = ap_latency.spread_labels([0.0, 1.0, 0.1, 5.0], 0.5)
    assert placed[0] < placed[2] < placed[1] < placed[3] == 5.0
    ordered = sorted(placed)
    assert all(b - a >= 0.5 - 1e-6 for a, b in zip(ordered, ordered[1:], strict=False))


def test_loss_of_a_seed_is_its_ap_minus_its_teachers(tmp_path):
    rows = [dict(name='teacher', seed=seed, AP=ap) for seed, ap in ((0, 0.5), (1, 0.6))]
    rows += [dict(name='fewest norms', seed=seed, AP=ap, kept=['norm'] * 4) for seed, ap in ((1, 0.57), (0, 0.51))]
    assert absorbed.losses(rows, 'fewest norms') == [(4, pytest.approx(-3.0)), (4, pytest.approx(1.0))]
    absorbed.draw(tmp_path / 'absorbed.svg')
    picture = (tmp_path / 'absorbed.svg').read_text()
    assert all(f'>{label}<' in picture for label in absorbed.CURVES.values())
