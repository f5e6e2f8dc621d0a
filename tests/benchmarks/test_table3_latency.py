"""The script of Table 3's latencies: its rows, and one of them measured on small images."""

import json
import sys
from pathlib import Path

from mmengine.config import Config

from benchmarks.table3_latency import ROOT, ROWS, main
from slab_det.measure.report import describe_model, read_paper_tables


def test_rows_are_those_of_the_paper_and_differ_in_the_norm_alone() -> None:
    table = read_paper_tables(ROOT / 'benchmarks' / 'paper_tables.json')[0]
    assert set(ROWS) | {row.base for row in ROWS.values()} == set(table.rows)
    for name, row in ROWS.items():
        stock, ours = (Config.fromfile(ROOT / 'configs' / f'{config}.py') for config in (row.stock, row.ours))
        assert (describe_model(stock.model)['name'], describe_model(ours.model)['name']) == (row.base, name)
        ours.merge_from_dict({'model.backbone': row.layer_norm})
        assert describe_model(ours.model)['norm'] == 'LN'


def test_a_row_is_measured_printed_and_added_to_the_file(tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / 'table.json'
    out.write_text('{"other": {}}')
    command = ['--rows', 'PVT-T-PRepBN', '--scope', 'backbone', '--size', 32, 32, '--rounds', 1, '--warmup', 1]
    monkeypatch.setattr(sys, 'argv', ['table3.py', *map(str, command), '--device', 'cpu', '--out', str(out)])
    main()
    printed = capsys.readouterr().out
    assert 'paper, V100, whole detector: 43.2 over 46.0 ms of PVT-T' in printed
    measured = json.loads(out.read_text())['PVT-T-PRepBN, backbone, float32']
    assert {name: (result['fused'], result['deployed']) for name, result in measured.items()} == {
        'PVT-T, mmdet': (False, False),
        'PVT-T-PRepBN with LayerNorm': (False, False),
        'PVT-T-PRepBN, fused': (True, False),
        'PVT-T-PRepBN with LayerNorm, deployed': (False, True),
        'PVT-T-PRepBN, fused, deployed': (True, True),
    }
    assert 'other' in json.loads(out.read_text())
