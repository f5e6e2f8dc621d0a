"""Cells of benchmarks/absorb: measured once, kept in a file."""

import json

from benchmarks.absorb.run import CONFIGS, METRICS, ROOT, Cells


def test_a_cell_is_measured_once(tmp_path):
    path = tmp_path / 'cells.json'
    calls = []

    def run():
        calls.append(1)
        return dict(AP=0.5)

    assert Cells(path).measure('teacher', 1, run)['AP'] == 0.5
    assert Cells(path).measure('teacher', 1, run)['AP'] == 0.5 and len(calls) == 1
    Cells(path).measure('teacher', 2, run)
    stored = json.loads(path.read_text())
    assert stored['cells']['teacher'].keys() == {'1', '2'} and len(calls) == 2 and stored['environment']


def test_every_dataset_has_a_config_and_a_metric():
    assert CONFIGS.keys() == METRICS.keys() and all((ROOT / config).exists() for config in CONFIGS.values())
