"""tools/latency.py as a user calls it, on small models."""

import json
from pathlib import Path

import torch
from mmengine.config import Config

from slab_det.measure.untrained import OBJECTS

QUICK = ('--device', 'cpu', '--size', 64, 96, '--rounds', 2, '--warmup', 1, '--threads', 1, '--json', 'report.json')


def test_end_to_end_latency_of_deployed_models(call, small_detector_cfg) -> None:
    for name, norm in (('layernorm.py', 'LN'), ('prepbn.py', 'PRepBN')):
        model = small_detector_cfg(norm_cfg={'type': norm})
        model.test_cfg.rpn.update(nms_pre=300, max_per_img=300)
        Config({'model': model}).dump(name)
    result = call('latency.py', 'layernorm.py', 'prepbn.py', '--fuse', '--deploy', '--scope', 'end-to-end', *QUICK)
    assert 'layernorm (unfused, deployed)' in result.out and 'prepbn (fused, deployed)' in result.out
    norm_count = {'layernorm.py': 1 + 2 * 6 + 3 + 4, 'prepbn.py': 0}
    for entry in json.loads(Path('report.json').read_text())['entries']:
        latency, config = entry['latency'], entry['config']
        assert latency['scope'] == 'end-to-end'
        assert latency['detections'] == OBJECTS, 'untrained models find equally many objects'
        assert latency['cost']['norms_left'] == norm_count[config]
        assert latency['cost']['multiply_adds'] > 1e7


def test_model_is_moved_to_the_device_before_deployment(call, small_detector_cfg, monkeypatch) -> None:
    devices: list = []

    def deploy(model: torch.nn.Module, *args: object, **options: object) -> None:
        devices.append({str(parameter.device) for parameter in model.parameters()})
        raise SystemExit(0)

    monkeypatch.setattr('slab_det.machine.find_device', lambda name: torch.device('meta'))
    monkeypatch.setattr('slab_det.deploy', deploy)
    Config({'model': small_detector_cfg(norm_cfg={'type': 'LN'})}).dump('layernorm.py')
    call('latency.py', 'layernorm.py', '--deploy', *QUICK)
    assert devices == [{'meta'}]


def test_bfloat16_latency_gets_its_own_entry(call, small_detector_cfg) -> None:
    Config({'model': small_detector_cfg(norm_cfg={'type': 'LN'})}).dump('layernorm.py')
    for dtype in ('float32', 'bfloat16'):
        call('latency.py', 'layernorm.py', '--dtype', dtype, '--scope', 'backbone', *QUICK)
    names = [entry['name'] for entry in json.loads(Path('report.json').read_text())['entries']]
    assert len(names) == 2 and names[1] == f'{names[0]}-bfloat16'


def test_unwritable_report_is_refused_before_the_measurement(call, small_detector_cfg) -> None:
    Config({'model': small_detector_cfg(norm_cfg={'type': 'LN'})}).dump('small.py')
    latency = call('latency.py', 'nowhere.py', '--json', 'small.py/report.json', code=1)
    test = call('test.py', 'small.py', 'nowhere.pth', '--report', 'small.py/report.json', code=1)
    for result in (latency, test):
        assert 'small.py/report.json: Not a directory' in result.err
