"""Latency measurements: what is run, in which order, on what input, and what the result says about it."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.structures import DetDataSample
from mmengine.structures import InstanceData
from torch import Tensor, nn

import slab_det
from slab_det import latency
from slab_det.errors import LatencyError
from slab_det.latency import SCOPES, describe_scope, latency_table, measure_latency

QUICK = {'size': (40, 70), 'rounds': 3, 'warmup': 1}


class RecordingDetector(nn.Module):
    """Writes down what is called, with what."""

    def __init__(self, name: str, calls: list, data_preprocessor: nn.Module | None = None) -> None:
        super().__init__()
        self.name, self.calls = name, calls
        self.weight = nn.Parameter(torch.ones(1))
        self.backbone = nn.Identity()
        self.data_preprocessor = data_preprocessor
        self.backbone.register_forward_hook(lambda *_: self.record('backbone'))

    def record(self, what: str, *details: object) -> None:
        self.calls.append((self.name, what, self.training, torch.is_inference_mode_enabled(), *details))

    def extract_feat(self, inputs: Tensor) -> Tensor:
        self.record('extract_feat')
        return inputs

    def predict(self, inputs: Tensor, samples: list[DetDataSample], rescale: bool) -> list[DetDataSample]:
        autocast = torch.get_autocast_dtype('cpu') if torch.is_autocast_enabled('cpu') else None
        self.record('predict', inputs.clone(), samples[0].metainfo, rescale, autocast, torch.get_num_threads())
        samples[0].pred_instances = InstanceData(scores=torch.ones(4))
        return samples


@pytest.mark.parametrize(
    ('scope', 'called'), [('backbone', 'backbone'), ('backbone+neck', 'extract_feat'), ('detector', 'predict')]
)
def test_models_are_interleaved_round_by_round_in_alternating_order(scope: str, called: str) -> None:
    calls: list = []
    models = {name: RecordingDetector(name, calls) for name in 'abc'}
    results = measure_latency(models, scope=scope, **QUICK)
    assert ''.join(call[0] for call in calls) == 'abccbaabccba'
    assert {call[1:4] for call in calls} == {(called, False, True)}, 'in eval mode, under inference_mode'
    for name, result in results.items():
        assert (result.name, result.scope, result.interleaved) == (name, scope, ('a', 'b', 'c'))
        assert result.detections == (4 if scope == 'detector' else None)


def test_bare_backbones_are_measured_at_backbone_scope() -> None:
    results = measure_latency({'conv': nn.Conv2d(3, 2, 1)}, scope='backbone', **QUICK)
    assert results['conv'].input_shape == (1, 3, 64, 96)


def test_warm_up_rounds_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1000.0, 1000.0, 4.0, 1.0, 2.0, 3.0, 30.0])

    def stopwatch(run) -> float:
        run()
        return next(times)

    monkeypatch.setattr(latency, '_time_cpu', stopwatch)
    result = measure_latency({'a': nn.Identity()}, size=(32, 32), rounds=5, warmup=2, scope='backbone')['a']
    counted = [1.0, 2.0, 3.0, 4.0, 30.0]
    assert (result.median_ms, result.mean_ms, result.min_ms) == (3.0, 8.0, 1.0)
    assert result.std_ms == pytest.approx(np.sqrt(sum((value - 8.0) ** 2 for value in counted) / 5))
    assert result.p95_ms == pytest.approx(4.0 + 0.8 * 26.0)


def test_input_is_what_the_test_loop_would_give(tmp_path: Path) -> None:
    image = np.random.default_rng(0).integers(0, 256, (20, 35, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / 'image.png'), image)
    mean, std = [10.0, 20.0, 30.0], [2.0, 3.0, 4.0]
    calls: list = []
    model = RecordingDetector('a', calls, DetDataPreprocessor(mean=mean, std=std, bgr_to_rgb=True, pad_size_divisor=64))
    measure_latency({'a': model}, image=str(tmp_path / 'image.png'), **QUICK)
    _, _, _, _, inputs, metainfo, rescale, _, _ = calls[-1]
    expected = np.zeros((64, 128, 3))
    expected[:40, :70] = (cv2.resize(image, (70, 40))[..., ::-1] - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(inputs[0].permute(1, 2, 0).numpy(), expected, rtol=1e-5, atol=1e-5)
    assert rescale is True
    assert metainfo['img_shape'] == (40, 70)
    assert tuple(metainfo['ori_shape']) == (20, 35)
    assert metainfo['scale_factor'] == (2.0, 2.0)
    assert metainfo['batch_input_shape'] == metainfo['pad_shape'] == (64, 128)


def test_noise_is_the_same_in_every_run() -> None:
    calls: list = []
    for _ in range(2):
        measure_latency({'a': RecordingDetector('a', calls)}, **QUICK)
    inputs = [call[4] for call in calls]
    assert all(torch.equal(inputs[0], other) for other in inputs[1:])
    assert inputs[0].std() > 0.5


def test_dtype_is_autocast_and_threads_are_restored() -> None:
    before = torch.get_num_threads()
    calls: list = []
    result = measure_latency({'a': RecordingDetector('a', calls)}, dtype='bfloat16', threads=2, **QUICK)['a']
    assert {call[-2:] for call in calls} == {(torch.bfloat16, 2)}
    assert (result.dtype, result.threads) == ('bfloat16', 2)
    assert torch.get_num_threads() == before


def test_result_carries_its_scope_and_is_json() -> None:
    result = measure_latency({'a': RecordingDetector('a', [])}, **QUICK)['a']
    stored = json.loads(json.dumps(result.to_dict()))
    assert stored == result.to_dict()
    assert stored['size'] == [40, 70]
    assert stored['input_shape'] == [1, 3, 64, 96]
    assert (stored['rounds'], stored['warmup'], stored['image']) == (3, 1, 'seeded noise')
    assert stored['timed'] == SCOPES['detector'].timed
    assert (stored['fused'], stored['compiled'], stored['device_type']) == (False, False, 'cpu')
    assert stored['threads'] == torch.get_num_threads()
    versions = stored['environment']['versions']
    assert versions['torch'] == torch.__version__
    assert versions['slab_det'] == slab_det.__version__
    assert set(versions) == {'python', 'torch', 'torchvision', 'mmengine', 'mmcv', 'mmdet', 'slab_det'}
    assert set(stored['environment']) >= {'tf32_matmul', 'tf32_cudnn', 'device', 'threads'}


def test_table_shows_ratios_to_the_first_and_the_scope() -> None:
    results = list(measure_latency({name: nn.Identity() for name in 'ab'}, scope='backbone', **QUICK).values())
    table = latency_table(results)
    assert f'| b | {results[1].median_ms:.2f} |' in table
    assert f' {results[1].median_ms / results[0].median_ms:.3f} |' in table
    assert describe_scope(results[0].to_dict()) in table
    assert 'batch 1, 40x70 (HxW), float32' in table


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'scope': 'neck'}, "scope 'neck' is not one of backbone, backbone\\+neck, detector"),
        ({'dtype': 'int8'}, "dtype 'int8' is not one of"),
        ({'device': 'cuda:99'}, "'cuda:99' is not there.*use --device cpu"),
        ({'device': 'gpu'}, "'gpu' is not cpu, cuda or cuda:N"),
        ({'device': 'meta'}, 'cannot be timed'),
        ({'rounds': 0}, 'rounds=0'),
        ({'size': (0, 5)}, r'size=\(0, 5\)'),
        ({'image': 'nowhere.jpg'}, 'image nowhere.jpg not found'),
    ],
)
def test_impossible_requests_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(LatencyError, match=message):
        measure_latency({'a': RecordingDetector('a', [])}, **{**QUICK, **changes})
    with pytest.raises(LatencyError, match='no model'):
        measure_latency({})
