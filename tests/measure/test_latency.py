"""Latency measurements: order and input of the rounds, and conditions in the result."""

import json
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
from slab_det.common.errors import SlabDetError
from slab_det.machine import MACHINE
from slab_det.measure import timer
from slab_det.measure.latency import LatencyResult, latency_table

QUICK = {'size': (40, 70), 'rounds': 3, 'warmup': 1}


def measure(model: nn.Module, **options: object) -> LatencyResult:
    return slab_det.measure_latency({'a': model}, **{**QUICK, **options})['a']


class RecordingDetector(nn.Module):
    """Records its calls and their arguments."""

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
    assert [*results] == [*models]
    assert ''.join(call[0] for call in calls) == 'abccbaabccba'
    assert {call[1:4] for call in calls} == {(called, False, True)}, 'in eval mode, under inference_mode'
    for result in results.values():
        assert (result.scope, result.detections) == (scope, 4 if called == 'predict' else None)


def test_warm_up_rounds_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # One warm-up round and three timed rounds; every second round starts with b.
    times = iter([900.0, 900.0, 20.0, 10.0, 11.0, 22.0, 24.0, 12.0])
    readings = (reading for elapsed in times for reading in (0.0, elapsed / 1e3))
    monkeypatch.setattr(timer, 'time', SimpleNamespace(perf_counter=lambda: next(readings), sleep=lambda _: None))
    models = {'a': nn.Identity(), 'b': nn.Identity()}
    results = slab_det.measure_latency(models, scope='backbone', **QUICK)
    a, b = results.values()
    assert (a.median_ms, a.mean_ms, a.p95_ms, b.median_ms) == pytest.approx((11, 11, 11.9, 22))
    assert a.std_ms == pytest.approx((2 / 3) ** 0.5)
    row = next(line for line in latency_table(results).splitlines() if line.startswith('| b |'))
    assert row.split(' | ')[2] == '22.00' and row.endswith('| 2.00 (2.00 to 2.00) |')


def test_end_to_end_gives_boxes_of_the_original_image(small_detector, tmp_path: Path) -> None:
    """Compares with mmdet's pipeline and test_step."""
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


def test_half_precision_weights_run_without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MACHINE, 'processors', 2)
    before = torch.get_num_threads()
    model = RecordingDetector()
    result = measure(model, dtype='bfloat16', threads=2)
    assert {call[-2:] for call in model.calls} == {(torch.bfloat16, 2)}
    assert (result.dtype, result.threads) == ('bfloat16 autocast', 2)
    assert torch.get_num_threads() == before
    model.bfloat16()
    for asked in ('bfloat16', 'float32'):
        result = measure(model, dtype=asked)
        *_, inputs, autocast, _ = model.calls[-1]
        assert (inputs.dtype, autocast, result.dtype) == (torch.bfloat16, None, 'bfloat16')


def test_result_records_its_conditions_for_json(monkeypatch: pytest.MonkeyPatch) -> None:
    result = measure(RecordingDetector())
    stored = json.loads(json.dumps(result.to_dict()))
    expected = {'size': [40, 70], 'rounds': 3, 'warmup': 1, 'threads': torch.get_num_threads(), 'kept_memory': False}
    assert {key: stored[key] for key in expected} == expected
    assert stored['environment']['versions']['torch'] == torch.__version__
    for name in ('MALLOC_MMAP_MAX_', 'MALLOC_TRIM_THRESHOLD_'):
        monkeypatch.setenv(name, '0')
    table = latency_table({'a': measure(RecordingDetector())})
    assert 'detector, batch 1, 40x70 (HxW), freed memory kept, ' in table


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'scope': 'neck'}, "scope 'neck' is not one of backbone, backbone\\+neck, detector"),
        ({'dtype': 'int8'}, "dtype 'int8' is not one of"),
        ({'device': 'cuda:99'}, "'cuda:99' is not available.*give device 'cpu'"),
        ({'rounds': 0}, 'rounds=0'),
        ({'warmup': -1}, 'warmup=-1'),
        ({'size': (0, 32)}, '^size=0 32: .* at least 1'),
        ({'size': (10**6, 10**6)}, '^size=1000000 1000000: more than'),
        ({'threads': 0}, '^threads=0: give a whole number from 1'),
        ({'image': __file__}, 'cannot be decoded'),
    ],
)
def test_invalid_arguments_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(SlabDetError, match=message):
        measure(RecordingDetector(), **changes)


def test_a_model_deployed_on_another_device_is_refused() -> None:
    model = RecordingDetector()
    model.deployed = True
    with pytest.raises(SlabDetError, match=r"deployed on cpu.*model\.to\('meta'\) before"):
        measure(model, device='meta')


def test_cost_covers_the_scope_and_is_in_the_table(small_detector) -> None:
    model = small_detector()
    results = slab_det.measure_latency({'a': model}, scope='backbone', cost=True, **QUICK)
    result = results['a']
    assert result.cost.parameters == sum(p.numel() for p in model.backbone.parameters()), 'of the scope alone'
    header, _, row = latency_table(results).splitlines()[:3]
    columns = dict(zip(header.strip('| ').split(' | '), row.strip('| ').split(' | '), strict=True))
    assert float(columns['G multiply-adds']) == pytest.approx(result.cost.multiply_adds / 1e9, abs=5e-4)
    assert float(columns['M parameters']) == pytest.approx(result.cost.parameters / 1e6, abs=5e-3)
    assert int(columns['norms left']) == result.cost.norms_left


def test_deployed_model_is_measured_in_the_dtype_it_was_deployed_in(small_detector) -> None:
    model = slab_det.fuse(small_detector())
    models = {'fused': model, 'deployed': slab_det.deploy(model, torch.bfloat16)}
    results = slab_det.measure_latency(models, size=(64, 96), rounds=1, warmup=0)
    assert [result.dtype for result in results.values()] == ['float32', 'bfloat16']
    table = latency_table(results)
    assert '| fused | float32 |' in table and '| deployed | bfloat16 |' in table
    device = results['fused'].device
    assert f'detector, batch 1, 64x96 (HxW), {device}' in table, 'the line below the table has no dtype'
