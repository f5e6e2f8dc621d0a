"""Latency measurements: what is run, in which order, on what input, and what the result says about it."""

import ctypes
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cv2
import mmcv
import numpy as np
import pytest
import torch
from mmdet.models.data_preprocessors import DetDataPreprocessor
from mmdet.structures import DetDataSample
from mmengine.dataset import Compose
from mmengine.structures import InstanceData
from torch import Tensor, nn

import slab_det
from slab_det.measure import latency
from slab_det.measure.latency import SCOPES, LatencyResult, describe_scope, latency_table, repeat_ratios
from slab_det.runtime.errors import LatencyError

QUICK = {'size': (40, 70), 'rounds': 3, 'warmup': 1}


def measure(model: nn.Module, **options: object) -> LatencyResult:
    return slab_det.measure_latency({'a': model}, **{**QUICK, **options})['a']


class RecordingDetector(nn.Module):
    """Writes down what is called, with what."""

    def __init__(self, name: str = 'a', calls: list | None = None, data_preprocessor: nn.Module | None = None) -> None:
        super().__init__()
        self.name, self.calls = name, [] if calls is None else calls
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


def test_bare_backbones_are_measured_in_the_memory_format_asked_for() -> None:
    for channels_last in (False, True):
        seen: list = []
        model = nn.Conv2d(3, 4, 3)
        model.register_forward_hook(lambda module, args, out, seen=seen: seen.append((args[0], module.weight)))
        result = measure(model, scope='backbone', channels_last=channels_last)
        assert {tuple(inputs.shape) for inputs, _ in seen} == {(1, 3, 64, 96)}
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        assert all(tensor.is_contiguous(memory_format=memory_format) for pair in seen for tensor in pair)
        assert ('float32, channels_last' in describe_scope(result.to_dict())) == channels_last


def test_warm_up_rounds_do_not_count_and_repeats_are_whole_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each repeat: one round of warm-up, then three; every second round begins with b.
    times = iter([900.0, 900.0, 20.0, 10.0, 11.0, 22.0, 24.0, 12.0, 900.0, 900.0, 21.0, 30.0, 31.0, 22.0, 23.0, 32.0])
    monkeypatch.setattr(latency, '_time_cpu', lambda run: next(times))
    models = {'a': nn.Identity(), 'b': nn.Identity()}
    a, b = slab_det.measure_latency(models, repeat=2, scope='backbone', **QUICK).values()
    assert (a.repeat_medians_ms, b.repeat_medians_ms) == ((11.0, 31.0), (22.0, 22.0))
    # Over all rounds of all repeats: 10, 11, 12, 30, 31, 32.
    assert (a.median_ms, a.mean_ms, a.p95_ms) == (21.0, 21.0, pytest.approx(31.75))
    assert a.std_ms == pytest.approx(((2 * (11**2 + 10**2 + 9**2)) / 6) ** 0.5)
    assert repeat_ratios(b, a) == pytest.approx((2.0, 22.0 / 31.0))
    table = latency_table([a, b])
    assert f'| {(2.0 + 22.0 / 31.0) / 2:.3f} |' in table, 'the median of the repeats'
    assert 'medians of 2 repeats' in table and '11.00 – 31.00' in table and '0.710 – 2.000' in table
    assert '3 rounds interleaved, 2 repeats' in table and '| b | float32 | 22.00 |' in table


@pytest.mark.parametrize('scope', ['detector', 'end-to-end'])
def test_input_is_what_the_test_loop_would_give(tmp_path: Path, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    image = np.random.default_rng(0).integers(0, 256, (20, 35, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / 'image.png'), image)
    mean, std = [10.0, 20.0, 30.0], [2.0, 3.0, 4.0]
    decode, decoded = mmcv.imfrombytes, []
    monkeypatch.setattr(mmcv, 'imfrombytes', lambda content: decoded.append(1) or decode(content))
    preprocess = DetDataPreprocessor(mean=mean, std=std, bgr_to_rgb=True, pad_size_divisor=64)
    model = RecordingDetector(data_preprocessor=preprocess)
    measure(model, image=str(tmp_path / 'image.png'), scope=scope)
    assert len(decoded) == 2 + (4 if scope == 'end-to-end' else 0), 'once a round, after the check and the first input'
    _, _, _, _, inputs, metainfo, rescale, _, _ = model.calls[-1]
    expected = np.zeros((64, 128, 3))
    expected[:40, :70] = (cv2.resize(image, (70, 40))[..., ::-1] - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(inputs[0].permute(1, 2, 0).numpy(), expected, rtol=1e-5, atol=1e-5)
    assert rescale is True
    assert metainfo['img_shape'] == (40, 70)
    assert tuple(metainfo['ori_shape']) == (20, 35)
    assert metainfo['scale_factor'] == (2.0, 2.0)
    assert metainfo['batch_input_shape'] == metainfo['pad_shape'] == (64, 128)


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
    inputs = [call[4] for call in model.calls]
    assert all(torch.equal(inputs[0], other) for other in inputs[1:])
    assert inputs[0].std() > 0.5


def test_dtype_is_autocast_unless_the_weights_have_it() -> None:
    before = torch.get_num_threads()
    model = RecordingDetector()
    result = measure(model, dtype='bfloat16', threads=2)
    assert {call[-2:] for call in model.calls} == {(torch.bfloat16, 2)}
    assert (result.dtype, result.autocast, result.threads) == ('bfloat16', True, 2)
    assert torch.get_num_threads() == before
    model.bfloat16()
    result = measure(model, dtype='bfloat16')
    _, _, _, _, inputs, _, _, autocast, _ = model.calls[-1]
    assert (inputs.dtype, autocast, result.autocast) == (torch.bfloat16, None, False)
    with pytest.raises(LatencyError, match=r"a has weights in torch.bfloat16; dtype 'float32' cannot be measured"):
        measure(model)


def test_result_carries_its_scope_and_is_json() -> None:
    result = measure(RecordingDetector())
    stored = json.loads(json.dumps(result.to_dict()))
    assert stored == result.to_dict()
    expected = {
        'size': [40, 70], 'rounds': 3, 'warmup': 1, 'image': 'seeded noise', 'timed': SCOPES['detector'].timed,
        'fused': False, 'deployed': False, 'compile_mode': None, 'tf32': False, 'channels_last': False,
        'autocast': False, 'device_type': 'cpu', 'threads': torch.get_num_threads(), 'kept_memory': False,
        'repeat_medians_ms': [stored['median_ms']], 'cost': None,
    }  # fmt: skip
    assert {key: stored[key] for key in expected} == expected
    versions = stored['environment']['versions']
    assert (versions['torch'], versions['slab_det']) == (torch.__version__, slab_det.__version__)
    assert set(versions) == {'python', 'torch', 'torchvision', 'mmengine', 'mmcv', 'mmdet', 'slab_det'}
    assert set(stored['environment']) >= {'tf32_matmul', 'tf32_cudnn', 'device', 'threads'}
    assert 'detector, batch 1, 40x70 (HxW), float32, ' in latency_table([result])


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'scope': 'neck'}, "scope 'neck' is not one of backbone, backbone\\+neck, detector"),
        ({'dtype': 'int8'}, "dtype 'int8' is not one of"),
        ({'device': 'cuda:99'}, "'cuda:99' is not there.*use --device cpu"),
        ({'device': 'gpu'}, "'gpu' is not cpu, cuda or cuda:N"),
        ({'device': 'meta'}, "'meta' is not cpu, cuda or cuda:N"),
        ({'rounds': 0}, 'rounds=0'),
        ({'size': (0, 5)}, r'size=\(0, 5\)'),
        ({'image': 'nowhere.jpg'}, 'image nowhere.jpg not found'),
        ({'image': __file__}, 'cannot be decoded'),
        ({'repeat': 0}, 'repeat=0'),
        ({'tf32': True}, "TF32 is a format of NVIDIA GPUs; on device 'cpu'"),
        ({'compile': 'fastest'}, "compile mode 'fastest' is not one of default, reduce-overhead"),
    ],
)
def test_impossible_requests_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(LatencyError, match=message):
        measure(RecordingDetector(), **changes)


@pytest.mark.parametrize(('asked', 'mode'), [(True, 'default'), ('reduce-overhead', 'reduce-overhead')])
def test_compile_takes_backbone_and_neck_with_the_mode(asked, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list = []
    monkeypatch.setattr(nn.Module, 'compile', lambda module, **options: compiled.append((module, options)))
    model = RecordingDetector()
    model.neck = nn.Identity()
    result = measure(model, compile=asked)
    assert compiled == [(model.backbone, {'mode': mode}), (model.neck, {'mode': mode})]
    assert result.compile_mode == mode
    assert ('torch.compile' in describe_scope(result.to_dict())) and (asked is True or mode in latency_table([result]))


def test_tf32_is_off_while_it_is_measured_and_as_before_after(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list = []
    model = nn.Identity()
    model.register_forward_hook(
        lambda *_: seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32))
    )
    monkeypatch.setattr(torch.backends.cudnn, 'allow_tf32', True)
    result = measure(model, scope='backbone')
    assert torch.backends.cudnn.allow_tf32
    assert set(seen) == {(False, False)} and result.environment['tf32_cudnn'] is False


def test_costs_stand_beside_latency(small_detector) -> None:
    model = small_detector()
    models = {'a': model, 'b': slab_det.fuse(model)}
    results = slab_det.measure_latency(models, scope='backbone', cost=True, **QUICK)
    a, b = results['a'].cost, results['b'].cost
    # Patch embedding, six blocks, three mergings, four outputs.
    assert a.norms_left == 1 + 2 * 6 + 3 + 4 and b.norms_left == 0
    assert a.parameters == sum(p.numel() for p in model.backbone.parameters()), 'of the scope alone'
    stored = json.loads(json.dumps(results['b'].to_dict()))['cost']
    assert (stored['norms_left'], stored['uncounted']) == (0, [])
    header, _, row, fused_row = latency_table(list(results.values())).splitlines()[:4]
    columns = dict(zip(header.split(' | '), row.split(' | '), strict=True))
    assert float(columns['G multiply-adds']) == pytest.approx(a.multiply_adds / 1e9, abs=5e-4)
    assert float(columns['M parameters']) == pytest.approx(a.parameters / 1e6, abs=5e-3)
    assert float(columns['peak MiB']) == pytest.approx(a.peak_bytes / 2**20, abs=0.5)
    assert row.endswith(f'| {a.norms_left} |') and fused_row.endswith('| 0 |')


@pytest.mark.parametrize(
    'changes', [{'scope': 'end-to-end'}, {'size': (64, 64)}, {'device': 'Another CPU'}, {'threads': 64}, {'tf32': True}]
)
def test_results_of_different_conditions_are_not_compared(changes: dict) -> None:
    result = measure(RecordingDetector())
    alike = replace(result, name='b', fused=True, deployed=True, compile_mode='default', channels_last=True)
    latency_table([result, alike])
    with pytest.raises(LatencyError, match=f"'a' and 'b' were measured differently \\({next(iter(changes))} "):
        latency_table([result, alike, replace(result, name='b', **changes)])


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


def test_memory_can_be_kept_with_glibc_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, 'CDLL', lambda name: object())
    with pytest.raises(LatencyError, match='only glibc can be told to keep freed memory'):
        measure(nn.Identity(), scope='backbone', keep_memory=True)
