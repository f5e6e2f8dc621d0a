"""tools/latency.py as a user calls it, on small models."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import CONFIGS
from mmengine.config import Config

from slab_det.measure.untrained import OBJECTS

TOOL = CONFIGS.parent / 'tools' / 'latency.py'
QUICK = ('--device', 'cpu', '--size', 64, 96, '--rounds', 2, '--warmup', 1, '--threads', 1)


@pytest.fixture
def call(tmp_path: Path, monkeypatch, capsys, small_detector_cfg) -> Callable[..., str]:
    """Runs the tool in a folder with layernorm.py and prepbn.py; returns what it printed."""
    monkeypatch.chdir(tmp_path)
    Config({'model': small_detector_cfg(norm_cfg={'type': 'LN'})}).dump('layernorm.py')
    Config({'model': small_detector_cfg(norm_cfg={'type': 'PRepBN'})}).dump('prepbn.py')

    def run(*arguments: object, code: int | None = None) -> str:
        monkeypatch.setattr(sys, 'argv', [str(argument) for argument in ('latency.py', *arguments)])
        if code is None:
            runpy.run_path(str(TOOL), run_name='__main__')
        else:
            with pytest.raises(SystemExit) as stop:
                runpy.run_path(str(TOOL), run_name='__main__')
            assert stop.value.code == code
        printed = capsys.readouterr()
        return printed.out + printed.err

    return run


def latencies() -> dict[str, dict]:
    content = json.loads(Path('report.json').read_text())
    return {entry['config']: entry['latency'] for entry in content['entries']}


def test_end_to_end_of_deployed_models_is_measured_repeatedly(call) -> None:
    printed = call(
        'layernorm.py',
        'prepbn.py',
        '--fuse',
        '--deploy',
        '--scope',
        'end-to-end',
        '--repeat',
        2,
        '--channels-last',
        '--json',
        'report.json',
        *QUICK,
    )
    assert 'layernorm (unfused, deployed)' in printed and 'prepbn (fused, deployed)' in printed
    assert 'medians of 2 repeats' in printed and 'seeded noise: ' in printed
    norm_count = {'layernorm.py': 1 + 2 * 6 + 3 + 4, 'prepbn.py': 0}
    for config, latency in latencies().items():
        assert (latency['scope'], latency['deployed'], latency['channels_last']) == ('end-to-end', True, True)
        assert latency['fused'] == (config == 'prepbn.py')
        assert len(latency['repeat_medians_ms']) == 2
        assert latency['detections'] == OBJECTS, 'untrained models find alike'
        assert latency['cost']['norms_left'] == norm_count[config]
        assert latency['cost']['multiply_adds'] > 1e7
        assert all(not name.startswith('mkldnn') for name in latency['cost']['uncounted'])


@pytest.mark.parametrize(
    ('flag', 'mode'), [(('--compile',), 'default'), (('--compile', 'reduce-overhead'), 'reduce-overhead')]
)
def test_compile_is_a_switch_or_a_mode(flag: tuple[str, ...], mode: str, call, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list = []
    monkeypatch.setattr(torch.nn.Module, 'compile', lambda module, mode: modes.append(mode))
    call('layernorm.py', *QUICK, '--scope', 'backbone', '--json', 'report.json', *flag)
    assert modes == [mode]
    assert latencies()['layernorm.py']['compile_mode'] == mode


def test_deploying_before_fusing_is_an_error(call) -> None:
    printed = call('prepbn.py', '--deploy', *QUICK, code=1)
    assert printed.splitlines()[-1].startswith('error: ') and 'slab_det.fuse' in printed


def test_tf32_needs_a_gpu(call) -> None:
    printed = call('layernorm.py', '--tf32', *QUICK, code=1)
    assert printed.splitlines()[-1].startswith('error: TF32 is a format of NVIDIA GPUs')
