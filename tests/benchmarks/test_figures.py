"""The picture of docs/latency.md is that of the stored results."""

import re

import pytest

from benchmarks import runtimes
from benchmarks.results import FOLDER, ROOT, Results


def test_the_picture_of_the_page_shows_the_stored_results(tmp_path):
    rows = Results(FOLDER / 'runtimes.json').select(size='800x1216', scope='detector')
    runtimes.draw(rows, tmp_path / 'latency.svg')
    drawn, shown = ((folder / 'latency.svg').read_text() for folder in (tmp_path, ROOT / 'docs'))
    assert find_texts(drawn) == find_texts(shown), 'draw docs/latency.svg again'
    # Points that versions of matplotlib may move a little.
    assert find_places(drawn) == [pytest.approx(place, abs=2) for place in find_places(shown)]


def find_texts(picture):
    return re.findall(r'>([^<>\n]+)</(?:text|tspan)>', picture)


def find_places(picture):
    return [tuple(map(float, place)) for place in re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"', picture)]
