"""The command lines around an exported file, end to end on generated images."""

import json
import runpy
import sys

import pytest
import torch
from conftest import CONFIGS, randomize
from mmdet.registry import MODELS

import slab_det

TOOLS = CONFIGS.parent / 'tools'


@pytest.fixture
def run_tool(monkeypatch):
    def run(name, *arguments):
        monkeypatch.setattr(sys, 'argv', [name, *map(str, arguments)])
        runpy.run_path(str(TOOLS / name), run_name='__main__')

    return run


@pytest.fixture
def run(small_run_cfg, tmp_path):
    """Config and checkpoint of a detector as a finished training leaves them."""
    cfg = small_run_cfg()
    model = MODELS.build(cfg.model)
    randomize(model, 0)
    slab_det.set_gamma(model, 0)
    torch.save(dict(meta={}, state_dict=model.state_dict()), tmp_path / 'last.pth')
    cfg.dump(tmp_path / 'config.py')
    return tmp_path / 'config.py', tmp_path / 'last.pth'


def test_detector_is_exported_quantized_and_evaluated(run, run_tool, tmp_path, capsys):
    out = tmp_path / 'model.onnx'
    run_tool('export_onnx.py', *run, '--out', out, '--size', 96, 128, '--int8', '--num-images', 2)
    printed = capsys.readouterr().out
    assert printed.count('largest relative difference') == 4 and '96x128' in printed
    assert out.stat().st_size > (tmp_path / 'model_int8.onnx').stat().st_size
    run_tool(
        'test_onnx.py',
        run[0],
        tmp_path / 'model_int8.onnx',
        '--work-dir',
        tmp_path / 'test',
        '--json',
        tmp_path / 'ap.json',
        '--threads',
        1,
    )
    result = json.loads((tmp_path / 'ap.json').read_text())
    assert result['ap'].keys() == {'bbox', 'segm'} and result['dataset']['images'] == 4
    assert result['file'].endswith('int8.onnx') and result['runtime'] == 'onnxruntime'


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        (['--out', 'model.pth'], 'must end in .onnx'),
        (['--out', 'model.onnx', '--check-images', 'nothing.jpg'], 'nothing.jpg not found'),
    ],
)
def test_what_cannot_be_done_is_one_line(run, run_tool, capsys, monkeypatch, tmp_path, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match='1'):
        run_tool('export_onnx.py', *run, *options, '--scope', 'backbone+neck+rpn')
    assert message in capsys.readouterr().err
