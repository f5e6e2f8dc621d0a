"""Latency measurements: what is run, in which order, on what input, and what the result says about it."""

import ctypes
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import cv2
import pytest
import torch
from mmdet.structures import DetDataSample
from mmengine.dataset import Compose
from mmengine.structures import InstanceData
from torch import Tensor, nn

import slab_det
from slab_det.measure import latency
from slab_det.measure.latency import SCOPES, LatencyResult, latency_table, repeat_ratios
from slab_det.runtime.errors import LatencyError

QUICK = {'size': (40, 70), 'rounds': 3, 'warmup': 1}


def measure(model: nn.Module, **options: object) -> LatencyResult:
    return slab_det.measure_latency({'a': model}, **{**QUICK, **options})['a']


class RecordingDetector(nn.Module):
    """Writes down what is called, with what."""

    def __init__(self, name: str = 'a', calls: list | None = None) -> None:
        super().__init__()
        self.name, self.calls = name, [] if calls is None else calls
        self.weight = nn.Parameter(torch.ones(1))
        self.backbone = nn.Identity()
        self.backbone.register_forward_hook(lambda *_: self.record('backbone'))

    def record(self, what: str, *details: object) -> None:
        self.calls.append((self.name, what, self.training, torch.is_inference_mode_enabled(), *details))

    def extract_feat(self, inputs: Tensor) -> Tensor:
        self.record('extract_feat')
        return inputs

    def forward(self, inputs: Tensor, samples: list[DetDataSample] | None, mode: str) -> list[DetDataSample]:
        autocast = torch.get_autocast_dtype('cpu') if torch.is_autocast_enabled('cpu') else None
        self.record(mode, inputs.clone(), autocast, torch.get_num_threads())
        return [DetDataSample(pred_instances=InstanceData(scores=torch.ones(4)))]


@pytest.mark.parametrize(
    ('scope', 'called'),
    [('backbone', 'backbone'), ('backbone+neck', 'extract_feat'), ('detector', 'predict'), ('end-to-end', 'predict')],
)
def test_models_are_interleaved_round_by_round_in_alternating_order(scope: str, called: str) -> None:
    calls: list = []
    models = {name: RecordingDetector(name, calls) for name in 'abc'}
    results = slab_det.measure_latency(models, scope=scope, **QUICK)
    assert ''.join(call[0] for call in calls) == 'abccbaabccba'
    assert {call[1:4] for call in calls} == {(called, False, True)}, 'in eval mode, under inference_mode'
    for name, result in results.items():
        assert (result.name, result.scope, result.interleaved) == (name, scope, ('a', 'b', 'c'))
        assert result.detections == (4 if called == 'predict' else None)


def test_a_bare_backbone_gets_the_padded_image() -> None:
    shapes: list = []
    model = nn.Conv2d(3, 4, 3)
    model.register_forward_hook(lambda module, args, out: shapes.append(tuple(args[0].shape)))
    measure(model, scope='backbone')
    assert set(shapes) == {(1, 3, 64, 96)}


def test_warm_up_rounds_do_not_count_and_repeats_are_whole_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each repeat: one round of warm-up, then three; every second round begins with b.
    times = iter([900.0, 900.0, 20.0, 10.0, 11.0, 22.0, 24.0, 12.0, 900.0, 900.0, 21.0, 30.0, 31.0, 22.0, 23.0, 32.0])
    readings = (reading for elapsed in times for reading in (0.0, elapsed / 1e3))
    monkeypatch.setattr(latency, 'time', SimpleNamespace(perf_counter=lambda: next(readings)))
    models = {'a': nn.Identity(), 'b': nn.Identity()}
    a, b = slab_det.measure_latency(models, repeat=2, scope='backbone', **QUICK).values()
    assert (*a.repeat_medians_ms, *b.repeat_medians_ms) == pytest.approx((11, 31, 22, 22))
    # Over all rounds of all repeats: 10, 11, 12, 30, 31, 32.
    assert (a.median_ms, a.mean_ms, a.p95_ms) == pytest.approx((21, 21, 31.75))
    assert a.std_ms == pytest.approx(((2 * (11**2 + 10**2 + 9**2)) / 6) ** 0.5)
    assert repeat_ratios(b, a) == pytest.approx((2.0, 22.0 / 31.0))
    table = latency_table([a, b])
    assert f'| {(2.0 + 22.0 / 31.0) / 2:.3f} |' in table, 'the median of the repeats'
    assert 'medians of 2 repeats' in table and '11.00 – 31.00' in table and '0.710 – 2.000' in table
    assert '3 rounds interleaved, 2 repeats' in table and '| b | float32 | 22.00 |' in table


def test_end_to_end_gives_boxes_of_the_original_image(small_detector, tmp_path: Path) -> None:
    """Against mmdet's own inference: file in, predictions out."""
    photo = str(tmp_path / 'photo.png')
    cv2.imwrite(photo, torch.randint(0, 256, (90, 120, 3), dtype=torch.uint8).numpy())
    model, found = small_detector(), []
    model.test_cfg.rcnn.score_thr = 0.0
    predict = model.predict
    model.predict = lambda *args, **options: found.append(predict(*args, **options)) or found[-1]
    measure(model, scope='end-to-end', image=photo, size=(60, 80), rounds=1, warmup=0)
    model.predict = predict
    pipeline = Compose(
        [
            {'type': 'LoadImageFromFile'},
            {'type': 'Resize', 'scale': (80, 60), 'keep_ratio': True},
            {'type': 'PackDetInputs', 'meta_keys': ('img_id', 'ori_shape', 'img_shape', 'scale_factor')},
        ]
    )
    data = pipeline({'img_path': photo, 'img_id': 0})
    with torch.no_grad():
        (expected,) = model.test_step({'inputs': [data['inputs']], 'data_samples': [data['data_samples']]})
    found, expected = found[0][0].pred_instances, expected.pred_instances
    assert len(expected) > 0 and expected.bboxes[:, 2].max() > 80, 'boxes are on the original image'
    torch.testing.assert_close(found.bboxes, expected.bboxes)
    assert torch.equal(found.masks, expected.masks)
    assert found.masks.shape[1:] == (90, 120)


def test_noise_is_the_same_in_every_run() -> None:
    model = RecordingDetector()
    measure(model), measure(model)
    first, *others = (call[4] for call in model.calls)
    assert first.std() > 0.5 and all(torch.equal(first, other) for other in others)


def test_dtype_is_autocast_unless_the_weights_have_it() -> None:
    before = torch.get_num_threads()
    model = RecordingDetector()
    result = measure(model, dtype='bfloat16', threads=2)
    assert {call[-2:] for call in model.calls} == {(torch.bfloat16, 2)}
    assert (result.dtype, result.autocast, result.threads) == ('bfloat16', True, 2)
    assert torch.get_num_threads() == before
    model.bfloat16()
    for asked in ('bfloat16', 'float32'):
        result = measure(model, dtype=asked)
        *_, inputs, autocast, _ = model.calls[-1]
        assert (inputs.dtype, autocast, result.autocast, result.dtype) == (torch.bfloat16, None, False, 'bfloat16')


def test_result_carries_its_scope_and_is_json() -> None:
    result = measure(RecordingDetector())
    stored = json.loads(json.dumps(result.to_dict()))
    assert stored == result.to_dict()
    expected = {'size': [40, 70], 'rounds': 3, 'warmup': 1, 'image': 'seeded noise', 'fused': False, 'deployed': False}
    expected |= {'autocast': False, 'kept_memory': False, 'threads': torch.get_num_threads(), 'cost': None}
    expected |= {'timed': SCOPES['detector'].timed, 'repeat_medians_ms': [stored['median_ms']], 'compiled': False}
    assert {key: stored[key] for key in expected} == expected
    environment = stored['environment']
    assert (environment['device'], environment['threads']) == (stored['device'], stored['threads'])
    assert set(environment['versions']) == {'python', 'torch', 'torchvision', 'mmengine', 'mmcv', 'mmdet', 'slab_det'}
    assert {'tf32_matmul', 'tf32_cudnn'} < set(environment)
    assert 'detector, batch 1, 40x70 (HxW), float32, ' in latency_table([result])


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'scope': 'neck'}, "scope 'neck' is not one of backbone, backbone\\+neck, detector"),
        ({'dtype': 'int8'}, "dtype 'int8' is not one of"),
        ({'device': 'cuda:99'}, "'cuda:99' is not there.*use --device cpu"),
        ({'device': 'gpu'}, "'gpu' is not there.*use --device cpu"),
        ({'rounds': 0}, 'rounds=0'),
        ({'repeat': 0}, 'repeat=0'),
        ({'image': __file__}, 'cannot be decoded'),
    ],
)
def test_impossible_requests_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(LatencyError, match=message):
        measure(RecordingDetector(), **changes)


def test_a_model_deployed_on_another_device_is_refused() -> None:
    model = RecordingDetector()
    model.deployed = True
    with pytest.raises(LatencyError, match=r"on meta a model .* deployed on cpu.*model\.to\('meta'\) before"):
        measure(model, device='meta')


@pytest.mark.parametrize('necks', [[], [None], [nn.Identity()]], ids=['no neck', 'neck=None', 'neck'])
def test_backbone_and_neck_are_compiled_and_counted(necks: list, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list = []
    monkeypatch.setattr(nn.Module, 'compile', lambda module: compiled.append(module))
    model = RecordingDetector()
    model.head = nn.Linear(2, 3)
    for neck in necks:
        model.neck = neck
    result = measure(model, scope='backbone+neck', compile=True, cost=True)
    assert compiled == [model.backbone, *filter(None, necks)] and result.cost.parameters == 0
    assert result.compiled and 'torch.compile' in latency_table([result])


def test_costs_stand_beside_latency(small_detector) -> None:
    model = small_detector()
    result = measure(model, scope='backbone', cost=True)
    assert result.cost.parameters == sum(p.numel() for p in model.backbone.parameters()), 'of the scope alone'
    assert json.loads(json.dumps(result.to_dict()))['cost']['norms_left'] == result.cost.norms_left
    header, _, row = latency_table([result]).splitlines()[:3]
    columns = dict(zip(header.strip('| ').split(' | '), row.strip('| ').split(' | '), strict=True))
    assert float(columns['G multiply-adds']) == pytest.approx(result.cost.multiply_adds / 1e9, abs=5e-4)
    assert float(columns['M parameters']) == pytest.approx(result.cost.parameters / 1e6, abs=5e-3)
    assert int(columns['norms left']) == result.cost.norms_left


def test_results_of_different_conditions_are_not_compared() -> None:
    result = measure(RecordingDetector())
    alike = replace(result, name='b', fused=True, deployed=True)
    latency_table([result, alike])
    for changes in ({'size': (64, 64)}, {'device': 'Another CPU'}, {'threads': 64}, {'interleaved': ('b',)}):
        with pytest.raises(LatencyError, match='a, b were measured differently'):
            latency_table([result, replace(result, name='b', **changes)])


def test_deployed_model_is_measured_in_the_dtype_it_was_deployed_in(small_detector) -> None:
    model = slab_det.fuse(small_detector())
    models = {'fused': model, 'deployed': slab_det.deploy(model, torch.bfloat16)}
    fused, deployed = slab_det.measure_latency(models, size=(64, 96), rounds=1, warmup=0).values()
    assert (fused.dtype, deployed.dtype, deployed.deployed, deployed.autocast) == ('float32', 'bfloat16', True, False)
    table = latency_table([fused, deployed])
    assert '| fused | float32 |' in table and '| deployed | bfloat16 |' in table
    assert 'detector, batch 1, 64x96 (HxW), ' + fused.device in table, 'the line below names only what all rows share'
    assert ', bfloat16, deployed, ' in latency_table([deployed])


# In a process of its own, since the allocator's settings cannot be taken back. By default glibc gives blocks above
# 32 MiB back to the system.
KEEPING = """
import json, resource, torch
from slab_det import measure_latency

class Spender(torch.nn.Module):
    def forward(self, x):
        return torch.ones(48 * 2**18)

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    Spender()(None)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for keep_memory in (False, True, False):
    result = measure_latency({'a': Spender()}, (32, 32), 5, scope='backbone', keep_memory=keep_memory)['a']
    print(json.dumps([result.kept_memory, pages()]))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), 'mallopt'), reason='the C library is not glibc')
def test_kept_memory_needs_no_fresh_pages() -> None:
    done = subprocess.run([sys.executable, '-c', KEEPING], capture_output=True, text=True, check=True)
    default, asked_for, afterwards = map(json.loads, done.stdout.splitlines()[-3:])
    # 48 MiB in pages of at most 2 MiB.
    assert not default[0] and default[1] >= 48 / 2
    for kept, pages in (asked_for, afterwards):
        assert kept and pages < 10
