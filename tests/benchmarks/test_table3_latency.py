"""The rows of the script of Table 3's latencies."""

from mmengine.config import Config

from benchmarks.table3_latency import ROOT, ROWS
from slab_det.measure.report import describe_model, read_paper_tables


def test_rows_are_those_of_the_paper_and_differ_in_the_norm_alone() -> None:
    table = read_paper_tables(ROOT / 'benchmarks' / 'paper_tables.json')[0]
    assert set(ROWS) | {row.base for row in ROWS.values()} == set(table.rows)
    for name, row in ROWS.items():
        stock, ours = (Config.fromfile(ROOT / 'configs' / f'{config}.py') for config in (row.stock, row.ours))
        assert (describe_model(stock.model)['name'], describe_model(ours.model)['name']) == (row.base, name)
        ours.merge_from_dict({'model.backbone': row.layer_norm})
        assert describe_model(ours.model)['norm'] == 'LN'
