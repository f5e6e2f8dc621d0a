"""The command lines: --help, usage errors and one-line error messages."""

import os
import runpy
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import timm
import torch
from conftest import CONFIGS, as_trained
from mmdet.registry import MODELS
from mmengine.config import Config
from torch.nn import functional

import slab_det
from slab_det import export
from slab_det.cli import COMMANDS, command
from slab_det.fusion.affine import fold_into_output
from slab_det.precisions import EXPORT_RUNTIMES
from slab_det.recalibration import PIPELINES

TOOLS = CONFIGS.parent / 'tools'


HELP = """
import runpy, sys
for tool in sys.argv[1:]:
    sys.argv = [tool, '--help']
    try:
        runpy.run_path(tool, run_name='__main__')
    except SystemExit:
        print(tool, *{'torch', 'mmcv', 'mmdet'} & sys.modules.keys(), file=sys.stderr)
"""


def test_every_command_has_a_tool_whose_help_does_not_import_torch() -> None:
    tools = [str(path) for path in TOOLS.glob('*.py')]
    assert {Path(tool).stem for tool in tools} == {*COMMANDS.values(), 'test_onnx'}
    done = subprocess.run([sys.executable, '-c', HELP, *tools], capture_output=True, text=True, cwd=TOOLS.parent)
    assert done.stderr.splitlines() == tools


@pytest.mark.parametrize(('own', 'value'), [('', '1'), ('0', '0')])
def test_commands_switch_off_the_telemetry_of_onnx_runtime_unless_the_user_chose(monkeypatch, own, value):
    monkeypatch.setattr(sys, 'argv', ['tool'])
    monkeypatch.setenv('ORT_DISABLE_TELEMETRY', own)
    if not own:
        monkeypatch.delenv('ORT_DISABLE_TELEMETRY')
    seen = []
    command(lambda parser: None)(lambda args: seen.append(os.environ['ORT_DISABLE_TELEMETRY']))()
    assert seen == [value]


@pytest.mark.parametrize('module', [*COMMANDS.values(), 'test_onnx'])
def test_every_command_runs_as_a_module(module: str, monkeypatch, capsys) -> None:
    """``python -m slab_det.cli.train CONFIG`` did nothing, with the exit code of success."""
    monkeypatch.setattr(sys, 'argv', [module, '--help'])
    with pytest.raises(SystemExit, match='^0$'):
        runpy.run_path(str(TOOLS.parent / 'slab_det' / 'cli' / f'{module}.py'), run_name='__main__')
    assert capsys.readouterr().out.startswith(f'usage: {module}')


@pytest.mark.parametrize(
    ('tool', 'flag', 'names'),
    [
        ('absorb.py', 'pipeline', PIPELINES),
        ('recalibrate.py', 'pipeline', PIPELINES),
        ('export_onnx.py', 'scope', export.EXPORT_SCOPES),
        ('test_onnx.py', 'runtime', EXPORT_RUNTIMES),
        ('test_onnx.py', 'precision', ('f32', 'bf16')),
        ('test.py', 'runtime', EXPORT_RUNTIMES),
        ('latency.py', 'dtype', ('float32', 'float16', 'bfloat16')),
    ],
)
def test_help_lists_the_choices_of_the_package(tool: str, flag: str, names: Iterable[str], call) -> None:
    assert f'--{flag} {{{",".join(names)}}}' in ' '.join(call(tool, '--help').out.split())


@pytest.mark.parametrize('option', ['train_cfg.max_iters', 'train_cfg.max_iters=[1,2'])
@pytest.mark.parametrize('tool', ['train.py', 'latency.py'])
def test_invalid_cfg_options_are_usage_errors(tool: str, option: str, call) -> None:
    result = call(tool, 'small.py', '--cfg-options', option, code=2)
    assert f'argument --cfg-options: {option}: give KEY=VALUE' in result.err


@pytest.fixture
def checkpoint(tmp_path: Path, small_detector_cfg, small_detector) -> Path:
    """The checkpoint small.pth, beside its config small.py."""
    Config(dict(model=small_detector_cfg())).dump(tmp_path / 'small.py')
    torch.save(dict(state_dict=small_detector().state_dict()), tmp_path / 'small.pth')
    return tmp_path / 'small.pth'


def test_fuse_writes_nothing_if_the_fused_model_differs(tmp_path: Path, checkpoint: Path, call, monkeypatch) -> None:
    def fold_wrongly(layer: torch.nn.Module, scale: torch.Tensor, shift: torch.Tensor) -> None:
        fold_into_output(layer, scale * (1 + 1e-7), shift)

    monkeypatch.setattr(slab_det.fusion.folding, 'fold_into_output', fold_wrongly)
    result = call('fuse.py', 'small.py', checkpoint, '--out', 'fused.pth', '--size', 65, 91, code=1)
    assert result.err.splitlines()[-1].startswith('error: the fused model differs from the unfused one')
    assert 'report this' in result.err
    assert {path.name for path in tmp_path.iterdir()} == {'small.py', 'small.pth'}


SMALL = {'embed_dims': 8, 'depths': (2, 1, 1, 1), 'num_heads': (1, 2, 2, 4)}


def timm_swin() -> torch.nn.Module:
    return as_trained(timm.models.SwinTransformer(embed_dim=8, depths=SMALL['depths'], num_heads=SMALL['num_heads']))


def write_config(path: Path, **backbone: object) -> None:
    Config({'model': {'type': 'MaskRCNN', 'backbone': {**SMALL, **backbone}}}).dump(path)


def test_timm_weights_convert_to_mmdet_layout(tmp_path: Path, call) -> None:
    theirs = timm_swin()
    torch.save(theirs.state_dict(), tmp_path / 'timm.pth')
    write_config(tmp_path / 'swin.py', type='SwinTransformer')
    result = call('convert_checkpoint.py', 'timm.pth', 'out/native.pth', '--config', 'swin.py', '--to', 'native')
    assert result.out.count('timm.pth (timm_swin)') == 1 and 'Written to out/native.pth' in result.out
    ours = MODELS.build({'type': 'SwinTransformer', **SMALL})
    # A strict load: all keys are mmdet's.
    ours.load_state_dict(torch.load(tmp_path / 'out' / 'native.pth', weights_only=True)['state_dict'])
    ours.double().eval(), theirs.double()
    x = torch.randn(1, 3, 224, 224, dtype=torch.double)
    with torch.no_grad():
        features = theirs.forward_intermediates(x, output_fmt='NCHW', intermediates_only=True)
        for output, feature in zip(ours(x), features, strict=True):
            # mmdet's Swin has an output norm after each stage, with weight 1 and bias 0.
            feature = feature.permute(0, 2, 3, 1)
            plain = functional.layer_norm(feature, feature.shape[-1:]).permute(0, 3, 1, 2)
            torch.testing.assert_close(output, plain, rtol=1e-9, atol=1e-9)
