"""slab-det report writes its table and its picture again, and nothing in the place of other files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_figure import SWIN

from slab_det.measure.report_file import write_report


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_a_second_report_replaces_the_first(tmp_path: Path, call: Callable) -> None:
    for entries in (SWIN[:1], SWIN):
        write_report('report.json', entries)
        # Beside other files, as in the folder of a run.
        printed = call('report.py', 'report.json', '--out', '.').out
    assert '| SLAB-Swin-T |' in printed
    found = contents(tmp_path)
    assert found.keys() == {'report.json', 'table.md', 'ap_latency.svg', '.slab_det_report'}
    assert '| SLAB-Swin-T |' in found['table.md'] and '>SLAB-Swin-T<' in found['ap_latency.svg']


@pytest.mark.parametrize('name', ['table.md', 'ap_latency.svg'])
def test_a_file_of_somebody_else_stays(tmp_path: Path, call: Callable, name: str) -> None:
    write_report('report.json', SWIN)
    path = tmp_path / 'out' / name
    path.parent.mkdir()
    path.write_text('mine')
    for _ in range(2):
        printed = call('report.py', 'report.json', '--out', 'out', code=1)
        assert f'error: out/{name} is not a file that slab-det report wrote: move it away' in printed.err
        assert path.read_text() == 'mine'
    path.unlink()
    call('report.py', 'report.json', '--out', 'out')
    assert path.read_text() != 'mine'
