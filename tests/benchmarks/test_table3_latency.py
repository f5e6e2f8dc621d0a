"""The script of the GPU table, on a CPU with small models."""

import json
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import CONFIGS
from mmengine.config import Config

from slab_det.measure.paper import SLAB_TABLE_3
from slab_det.norms import named_offline_norms

SCRIPT = CONFIGS.parent / 'benchmarks' / 'table3_latency.py'
# The width of the neck and of all heads.
WIDTH = 16
SMALL_BACKBONE = {
    'backbone.embed_dims': 8, 'backbone.depths': [1, 1, 1, 1], 'backbone.num_heads': [1, 1, 2, 2],
    'neck.in_channels': [8, 16, 32, 64],
}  # fmt: skip
SMALL_HEADS = {
    'neck.out_channels': WIDTH,
    'rpn_head.in_channels': WIDTH, 'rpn_head.feat_channels': WIDTH,
    'roi_head.bbox_roi_extractor.out_channels': WIDTH, 'roi_head.bbox_head.in_channels': WIDTH,
    'roi_head.bbox_head.fc_out_channels': WIDTH, 'roi_head.mask_roi_extractor.out_channels': WIDTH,
    'roi_head.mask_head.in_channels': WIDTH, 'roi_head.mask_head.conv_out_channels': WIDTH,
    'test_cfg.rpn.nms_pre': 100, 'test_cfg.rpn.max_per_img': 100,
}  # fmt: skip
QUICK = ('--device', 'cpu', '--size', 64, 96, '--rounds', 2, '--warmup', 1, '--repeat', 2, '--threads', 1)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable[..., tuple]:
    """Runs the script as a user would; returns what is measured then, and what it printed."""

    def run(*arguments: object, code: int | None = None) -> tuple[dict, str]:
        small = {**SMALL_BACKBONE, **SMALL_HEADS}
        options = ('--cfg-options', *(f'model.{key}={value}'.replace(' ', '') for key, value in small.items()))
        command = [str(SCRIPT), *QUICK, '--out', tmp_path / 'new' / 'table.json', *arguments, *options]
        monkeypatch.setattr(sys, 'argv', [str(argument) for argument in command])
        if code is None:
            runpy.run_path(str(SCRIPT), run_name='__main__')
        else:
            with pytest.raises(SystemExit) as stop:
                runpy.run_path(str(SCRIPT), run_name='__main__')
            assert stop.value.code == code
        printed = capsys.readouterr()
        content = json.loads((tmp_path / 'new' / 'table.json').read_text())
        return content['measured'], printed.out + printed.err

    return run


def cells(printed: str, row: str) -> dict[str, str]:
    """The cells of a row of the first table, by title."""
    lines = [[cell.strip() for cell in line.strip('|').split('|')] for line in printed.splitlines() if line[:1] == '|']
    return dict(zip(lines[0], next(line for line in lines if line[0] == row), strict=True))


def test_rows_are_measured_once_and_printed_with_targets(call) -> None:
    measured, printed = call('--rows', 'Swin-T', '--scopes', 'backbone+neck', 'detector')
    assert list(measured) == [f'Swin-T + Swin-T-PRepBN, float32, {scope}' for scope in ('backbone+neck', 'detector')]
    columns = measured['Swin-T + Swin-T-PRepBN, float32, backbone+neck']
    assert {name: (column['fused'], column['deployed']) for name, column in columns.items()} == {
        'stock': (False, False),
        'layer norm': (False, False),
        'layer norm deployed': (False, True),
        'fused': (True, False),
        'fused deployed': (True, True),
    }
    assert {tuple(column['interleaved']) for column in columns.values()} == {tuple(columns)}
    heads = measured['Swin-T + Swin-T-PRepBN, float32, detector']
    assert len({column['detections'] for column in heads.values()}) == 1

    row = cells(printed, 'Swin-T-PRepBN')
    assert row['PRepBN fused eager, ms'] == f'{columns["fused"]["median_ms"]:.2f}'
    for one, title in (('fused', 'PRepBN fused eager'), ('fused deployed', 'PRepBN fused deployed')):
        pairs = zip(columns[one]['repeat_medians_ms'], columns['stock']['repeat_medians_ms'], strict=True)
        first, second = (mine / stock for mine, stock in pairs)
        shown = re.match(r'([\d.]+) \(([\d.]+) – ([\d.]+)\)', row[f'{title} / mmdet LN eager'])
        expected = ((first + second) / 2, min(first, second), max(first, second))
        assert [float(value) for value in shown.groups()] == pytest.approx(expected, abs=6e-4)
    assert row['paper (V100, whole detector)'] == f'{43.0 / 51.0:.3f}'
    assert cells(printed, 'Swin-T')['PRepBN fused eager / mmdet LN eager'] == '–', 'LayerNorm has nothing to fuse'
    target = cells(printed, 'target')
    assert [value for value in target.values() if value not in ('target', '')] == ['≤ 0.85', '≤ 0.35', 'hope 0.90']

    # As after a run that was cut off.
    again, printed = call('--rows', 'Swin-T-PRepBN', 'Flatten-Swin-T', '--scopes', 'backbone+neck')
    assert 'Swin-T, Swin-T-PRepBN: float32: in ' in printed and 'Flatten-Swin-T: float32, backbone+neck' in printed
    assert {key: again[key] for key in measured} == measured
    assert set(again['Flatten-Swin-T, float32, backbone+neck']) == {'stock', 'layer norm', 'layer norm deployed'}

    _, printed = call('--rows', 'Swin-T', '--rounds', 3, code=1)
    assert 'was measured with other settings: rounds 2 there, 3 here. Give another --out, or --again' in printed
    _, printed = call('--rows', 'Swin-T', '--form', 'compile', code=2)
    assert '--form compile needs --warmup 3 at least' in printed


def test_half_precision_has_the_stock_model_without_autocast_too(call) -> None:
    measured, printed = call('--rows', 'SLAB-Swin-T', '--dtypes', 'bfloat16', '--scopes', 'detector')
    columns = measured['SLAB-Swin-T, bfloat16, detector']
    autocast = {name for name, column in columns.items() if column['autocast']}
    assert autocast == {'stock', 'layer norm', 'fused'}
    assert set(columns) - autocast == {'stock cast', 'layer norm deployed', 'fused deployed'}
    assert 'PRepBN fused deployed / mmdet LN eager, weights cast' in cells(printed, 'SLAB-Swin-T')


def test_ten_rows_differ_in_the_norm_alone() -> None:
    script = runpy.run_path(str(SCRIPT), run_name='imported')
    families = script['FAMILIES']
    assert sorted(row for family in families for row in family.rows) == sorted(SLAB_TABLE_3.rows)
    for family in families:
        pvt = 'pvt' in family.ours
        options = {f'model.{key}': value for key, value in SMALL_HEADS.items()}
        options['model.backbone.num_layers' if pvt else 'model.backbone.depths'] = [1, 1, 1, 1]
        stock, twin = script['build_stock'](family, options), script['build'](family.ours, family.twin, options)
        assert type(stock.backbone).__name__ == ('PyramidVisionTransformer' if pvt else 'SwinTransformer')
        ours = Config.fromfile(CONFIGS / f'{family.ours}.py').model.backbone
        assert (ours.get('norm_cfg', {}).get('type') == 'PRepBN') == (family.prepbn is not None)
        assert type(twin.backbone).__name__ == ours.type
        assert not list(named_offline_norms(twin)), family.rows
        norms = [module.eps for module in twin.modules() if type(module).__name__ == 'LayerNorm']
        assert norms and set(norms) == {1e-6 if pvt else 1e-5}
