"""tools/latency.py as a user calls it, on small models."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mmengine.config import Config

from slab_det.measure.untrained import OBJECTS

QUICK = ('--device', 'cpu', '--size', 64, 96, '--rounds', 2, '--warmup', 1, '--threads', 1)


@pytest.fixture
def measure(call, small_detector_cfg) -> Callable[..., str]:
    """Runs the tool in a folder with layernorm.py and prepbn.py; returns what it printed."""
    for name, norm in (('layernorm.py', 'LN'), ('prepbn.py', 'PRepBN')):
        Config({'model': small_detector_cfg(norm_cfg={'type': norm})}).dump(name)

    def run(*arguments: object, code: int = 0) -> str:
        result = call('latency.py', *arguments, *QUICK)
        assert result.code == code, result.err
        return result.out + result.err

    return run


def latencies() -> dict[str, dict]:
    content = json.loads(Path('report.json').read_text())
    return {entry['config']: entry['latency'] for entry in content['entries']}


def test_end_to_end_of_deployed_models_is_measured_repeatedly(measure) -> None:
    forms = ('--fuse', '--deploy', '--scope', 'end-to-end', '--repeat', 2, '--channels-last')
    printed = measure('layernorm.py', 'prepbn.py', *forms, '--json', 'report.json')
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


@pytest.mark.parametrize(('flag', 'mode'), [((), 'default'), (('reduce-overhead',), 'reduce-overhead')])
def test_compile_is_a_switch_or_a_mode(flag: tuple, mode: str, measure, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list = []
    monkeypatch.setattr(torch.nn.Module, 'compile', lambda module, mode: modes.append(mode))
    measure('layernorm.py', '--scope', 'backbone', '--json', 'report.json', '--compile', *flag)
    assert modes == [mode] == [latencies()['layernorm.py']['compile_mode']]


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (('prepbn.py', '--deploy'), 'slab_det.fuse'),
        (('layernorm.py', '--tf32'), 'TF32 is a format of NVIDIA GPUs'),
        (('layernorm.py', 'layernorm.py'), 'layernorm.py is listed twice'),
    ],
)
def test_what_cannot_be_measured_is_one_line(arguments: tuple, message: str, measure) -> None:
    error = measure(*arguments, code=1).splitlines()[-1]
    assert error.startswith('error: ') and message in error
