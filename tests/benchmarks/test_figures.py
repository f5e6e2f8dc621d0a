"""The pictures of the pages are those of the stored results."""

import re

import pytest

from benchmarks import pages
from benchmarks.absorb import figure as absorbed
from benchmarks.results import ROOT


def test_loss_of_a_seed_is_its_ap_minus_its_teachers(tmp_path):
    rows = [dict(name='teacher', seed=seed, AP=ap) for seed, ap in ((0, 0.5), (1, 0.6))]
    rows += [dict(name='fewest norms', seed=seed, AP=ap, kept=['norm'] * 4) for seed, ap in ((1, 0.57), (0, 0.51))]
    assert absorbed.losses(rows, 'fewest norms') == [(4, pytest.approx(-3.0)), (4, pytest.approx(1.0))]
    absorbed.draw(tmp_path / 'absorbed.svg')
    picture = (tmp_path / 'absorbed.svg').read_text()
    assert all(f'>{label}<' in picture for label in absorbed.CURVES.values())


def test_pictures_of_the_pages_show_the_stored_results(tmp_path):
    pages.draw(tmp_path)
    for name in ('absorbed.svg', 'latency.svg', 'optimize.svg'):
        drawn, shown = ((folder / name).read_text() for folder in (tmp_path, ROOT / 'docs'))
        assert find_texts(drawn) == find_texts(shown), f'python -m benchmarks.pages draws docs/{name} again'
        # Points that versions of matplotlib may move a little.
        assert find_places(drawn) == [pytest.approx(place, abs=2) for place in find_places(shown)], name


def find_texts(picture):
    return re.findall(r'>([^<>\n]+)</(?:text|tspan)>', picture)


def find_places(picture):
    return [tuple(map(float, place)) for place in re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', picture)]
