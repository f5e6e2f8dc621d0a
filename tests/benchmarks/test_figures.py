"""The pictures of the pages are those of the stored results."""

import re

import pytest

from benchmarks import optimize, pages
from benchmarks.results import FOLDER, ROOT, Results


def test_the_pictures_of_the_pages_show_the_stored_results(tmp_path):
    pages.draw(tmp_path)
    drawn = {path.relative_to(tmp_path) for path in tmp_path.rglob('*.svg')}
    assert {path.name for path in drawn} == {'latency.svg', 'ruler.svg'}
    for name in drawn:
        new, shown = ((folder / name).read_text() for folder in (tmp_path, ROOT))
        assert find_texts(new) == find_texts(shown), f'python -m benchmarks.pages draws {name} again'
        # Points that versions of matplotlib may move a little.
        assert find_places(new) == [pytest.approx(place, abs=2) for place in find_places(shown)]


def test_the_picture_of_optimize_names_every_stored_form(tmp_path):
    results = Results(FOLDER / 'optimize_bccd.json')
    new = dict(retained_ap=0.98, loss_range=(0.5, 1.5), tie=False)
    results.rows = [row | new | dict(retained_ap=1 - i / 20) for i, row in enumerate(results.rows)]
    few, many = 215, results.rows[-1]['detections']
    results.rows[0]['detections'] = few
    optimize.draw(results, tmp_path / 'optimize.svg')
    shown = ' '.join(' '.join(find_texts((tmp_path / 'optimize.svg').read_text())).split())
    for row in results.rows:
        assert row['name'] in shown, row['name']
    assert ': recommended' in shown and ': dropped' in shown and '(40% retained)' in shown
    assert f'on {many:,} detections; hollow: on {few}' in shown


def find_texts(picture):
    return re.findall(r'>([^<>\n]+)</(?:text|tspan)>', picture)


def find_places(picture):
    return [tuple(map(float, place)) for place in re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', picture)]
