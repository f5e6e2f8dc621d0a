"""The benchmark of fused Swin's token layout: what it compares differs in nothing but the layout."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from conftest import CONFIGS

SCRIPT = CONFIGS.parent / 'benchmarks' / 'token_layout.py'


def test_models_differ_in_layout_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = runpy.run_path(str(SCRIPT), run_name='imported')
    state = script['main'].__globals__
    monkeypatch.setitem(state, 'CASES', (('configs/_base_/models/mask_rcnn_swin_small.py', (64, 96)),))
    measured, measure = {}, state['measure_latency']

    def without_keeping(models: dict, *args, keep_memory: bool, **options) -> dict:
        measured.update(models)
        return measure(models, *args, **options)

    # What it asks of the allocator cannot be taken back.
    monkeypatch.setitem(state, 'measure_latency', without_keeping)
    out = tmp_path / 'layout.json'
    monkeypatch.setattr('sys.argv', ['token_layout.py', '--rounds', '1', '--threads', '1', '--out', str(out)])
    script['main']()
    assert [*json.loads(out.read_text())['mask_rcnn_swin_small 64x96']] == [*measured]
    layouts, outputs = [], []
    by_channel, fused = (measured[name].backbone for name in ('fused, tokens by channel', 'fused'))
    by_channel.load_state_dict(fused.state_dict())
    for backbone in (by_channel, fused):
        backbone.stages[0].register_forward_pre_hook(lambda _, args: layouts.append(args[0].is_contiguous()))
        outputs.append(backbone(torch.ones(1, 3, 64, 96)))
    assert layouts == [False, True]
    for a, b in zip(*outputs, strict=True):
        torch.testing.assert_close(a, b)
