"""load_detector finds the same objects in any form of an image, in any runtime and from any thread."""

from __future__ import annotations

import gc
import json
import os
import pickle
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from urllib.request import Request, urlopen

import cv2
import numpy as np
import PIL.Image
import pytest
import torch
from conftest import CONFIGS, SMALL_SWIN, as_trained, find_objects
from graph_cases import SEGMENTERS, build, unmatched
from mmdet.apis import inference_detector, init_detector
from mmdet.registry import MODELS, TRANSFORMS
from mmdet.structures import DetDataSample
from mmdet.structures.mask import encode_mask_results
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from mmengine.model import BaseModel
from mmengine.runner import Runner
from pycocotools.mask import decode
from torch import nn

import slab_det
import slab_det_command
from slab_det.checkpoints import build_detector
from slab_det.common.errors import CheckpointError, ConfigError, DataError, DeploymentError, ExportError
from slab_det.common.pipeline import ImagePipeline, find_test_pipeline
from slab_det.common.record import write_record
from slab_det.data import SyntheticShapes
from slab_det.export import check_parity, export_onnx, in_onnxruntime, load_runtime, random_images
from slab_det.export.settings import detector_settings, follow_config
from slab_det.fusion import FusionError, save_fused
from slab_det.inference import ImageListError, ServedDetector
from slab_det.inference.folder import OPTIMIZE_JSON
from slab_det.machine import MACHINE

RUNTIMES = ('torch', 'onnxruntime', 'openvino')
EXAMPLES = CONFIGS.parent / 'examples'
GENERATOR = np.random.default_rng(0)
# Blobs of several pixels, in which detectors find objects.
IMAGES = [
    cv2.resize(GENERATOR.integers(0, 256, (h // 6, w // 6, 3), dtype=np.uint8), (w, h))
    for h, w in ((96, 120), (150, 90), (60, 200), (96, 120))
]


@pytest.fixture(scope='module')
def files(module_run_cfg: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Fused config, fused checkpoint and ONNX file of a small Mask R-CNN that finds objects in noise."""
    cfg = module_run_cfg(**SMALL_SWIN)
    cfg.model.test_cfg.rpn.update(nms_pre=60, max_per_img=40)
    cfg.model.test_cfg.rcnn.max_per_img = 20
    model = find_objects(as_trained(MODELS.build(cfg.model)))
    folder = tmp_path_factory.mktemp('served')
    fused = slab_det.fuse(model)
    # build_detector sets these too; the file says how its config resizes images.
    fused.cfg, fused.dataset_meta = cfg, dict(classes=('a', 'b', 'c', 'd'))
    checkpoint, config = save_fused(fused, cfg, folder / 'fused.pth', fused.dataset_meta)
    export_onnx(fused, folder / 'model.onnx')
    return config, checkpoint, folder / 'model.onnx'


@pytest.fixture(scope='module')
def served(files: tuple[Path, Path, Path]) -> Callable[[str], ServedDetector]:
    """A function that loads the detector in a runtime."""

    @cache
    def load(runtime: str) -> ServedDetector:
        if runtime == 'openvino':
            pytest.importorskip('openvino')
        options = dict(device='cpu') if runtime == 'torch' else dict(threads=1)
        return slab_det.load_detector(files[0], files[1 if runtime == 'torch' else 2], runtime, **options)

    return load


def assert_same(found: DetDataSample, wanted: DetDataSample, exact: bool) -> None:
    assert {key: found.metainfo[key] for key in ('ori_shape', 'img_shape', 'scale_factor')} == {
        key: wanted.metainfo[key] for key in ('ori_shape', 'img_shape', 'scale_factor')
    }
    found, wanted = found.pred_instances, wanted.pred_instances
    assert {*found.keys()} == {*wanted.keys()} == {'bboxes', 'scores', 'labels', 'masks'}
    if exact:
        assert all(found[key].equal(wanted[key]) for key in wanted.keys())
        return
    assert len(wanted) > 5 and unmatched(found, wanted, boxes=0.1, scores=1e-3) <= 0.02
    assert all(found[key].dtype == wanted[key].dtype for key in wanted.keys())
    # Objects of equal scores may change places.
    apart = (found.bboxes[:, None] - wanted.bboxes).abs().amax(-1) + (found.scores[:, None] - wanted.scores).abs()
    partner = (apart + 1e3 * (found.labels[:, None] != wanted.labels)).argmin(1)
    assert (found.masks != wanted.masks[partner]).float().mean() < 1e-3


@pytest.mark.parametrize('runtime', RUNTIMES)
def test_detections_of_every_runtime_and_image_form_equal_mmdets(runtime, files, served, tmp_path):
    detector = served(runtime)
    model = init_detector(str(files[0]), str(files[1]), device='cpu')
    wanted = inference_detector(model, IMAGES[:3])
    paths = [tmp_path / f'{i}.png' for i in range(3)]
    for path, image in zip(paths, IMAGES, strict=False):
        cv2.imwrite(str(path), image)
    arrays = detector(IMAGES[:3])
    for results in (
        detector([*map(str, paths)]),
        detector(tuple(path.read_bytes() for path in paths)),
        [detector(paths[0]), detector(paths[1].read_bytes()), detector(PIL.Image.open(paths[2]))],
    ):
        for found, array, expected in zip(results, arrays, wanted, strict=True):
            assert_same(found, array, exact=True)
            assert_same(found, expected, exact=False)
    assert {*found.metainfo} == {*served('torch')(IMAGES[0]).metainfo} and detector.classes == ('a', 'b', 'c', 'd')


@pytest.mark.parametrize('runtime', RUNTIMES)
def test_threads_share_a_detector(runtime, served):
    detector = served(runtime)
    images = IMAGES[:3] * 4
    wanted = detector(images)
    with ThreadPoolExecutor(4) as pool:
        for found, expected in zip(pool.map(detector, images), wanted, strict=True):
            assert_same(found, expected, exact=True)


def test_another_process_loads_an_exported_detector_from_its_pickle(files, served, tmp_path, monkeypatch):
    # A relative path, another threshold, and another folder in the other process.
    score_thr = served('onnxruntime')(IMAGES[0]).pred_instances.scores[8].item()
    cfg = with_settings(files[0], test_cfg__rcnn__score_thr=score_thr)
    monkeypatch.chdir(files[2].parent)
    detector = slab_det.load_detector(cfg, files[2].name, 'onnxruntime', masks='rle', threads=1)
    wanted = detector(IMAGES[0]).pred_instances
    assert 3 < len(wanted) <= 8 and wanted.scores.min() > score_thr
    for method in ('spawn', 'fork'):
        with ProcessPoolExecutor(1, get_context(method), os.chdir, (tmp_path,)) as pool:
            found = pool.submit(detector, IMAGES[0]).result().pred_instances
        assert found.masks == wanted.masks, method
        assert all(found[key].equal(wanted[key]) for key in ('bboxes', 'scores', 'labels')), method


@pytest.mark.parametrize('runtime', ['torch', 'openvino'])
def test_a_pickled_detector_finds_the_same(runtime, served):
    detector = served(runtime)
    assert_same(pickle.loads(pickle.dumps(detector))(IMAGES[0]), detector(IMAGES[0]), exact=True)


def test_a_pickled_detector_names_a_file_that_is_gone(files, tmp_path):
    shutil.copy(files[2], tmp_path / 'moved.onnx')
    content = pickle.dumps(slab_det.load_detector(files[0], tmp_path / 'moved.onnx', 'onnxruntime', threads=1))
    (tmp_path / 'moved.onnx').unlink()
    with pytest.raises(ExportError, match=r'there is no file .*moved\.onnx'):
        pickle.loads(content)


def test_a_runtime_starts_no_more_threads_than_this_process_may_use(files, monkeypatch):
    import onnxruntime

    asked = []
    monkeypatch.setattr(in_onnxruntime, 'load', in_onnxruntime.load.__wrapped__)
    monkeypatch.setattr(os, 'cpu_count', lambda: 64)
    monkeypatch.setattr(
        onnxruntime, 'InferenceSession', lambda _, options, **__: asked.append(options.intra_op_num_threads)
    )
    # The runtime itself knows better how many of all processors it needs.
    for processors, threads in ((1, 1), (2, 2), (64, 0)):
        monkeypatch.setattr(MACHINE, 'processors', processors)
        load_runtime(files[2])
        assert asked.pop() == threads
    monkeypatch.setattr(MACHINE, 'processors', 1)
    with pytest.raises(ExportError, match='^threads=2: give a whole number from 0 to 1'):
        slab_det.load_detector(files[0], files[2], 'onnxruntime', threads=2)


@pytest.mark.parametrize('kind', SEGMENTERS)
@pytest.mark.parametrize('instance_on', [True, False])
def test_a_segmenter_returns_all_that_it_predicts(kind, instance_on, files):
    model, steps = segmenter(kind), find_test_pipeline(Config.fromfile(files[0]))
    model.panoptic_fusion_head.test_cfg.instance_on = instance_on
    data = ImagePipeline(steps)(IMAGES[0])
    with torch.no_grad():
        (wanted,) = model.test_step(dict(inputs=[data['inputs']], data_samples=[data['data_samples']]))
    found = ServedDetector(model, steps)(IMAGES[0])
    segments = found.pred_panoptic_seg.sem_seg
    assert segments.equal(wanted.pred_panoptic_seg.sem_seg) and len(segments.unique()) > 1
    assert segments.shape == (1, *IMAGES[0].shape[:2])
    assert {*found.keys()} == {'pred_panoptic_seg'} | ({'pred_instances'} if instance_on else set())
    if instance_on:
        assert found.pred_instances.masks.equal(wanted.pred_instances.masks)


@cache
def segmenter(kind: str) -> nn.Module:
    return build(kind, random.Random(0))


@pytest.mark.parametrize('runtime', RUNTIMES)
def test_rle_masks_and_their_ap_equal_full_masks(runtime, files, served, tmp_path):
    options = dict(device='cpu') if runtime == 'torch' else dict(threads=1)
    full = served(runtime)
    encoded = slab_det.load_detector(files[0], files[1 if runtime == 'torch' else 2], runtime, masks='rle', **options)
    for found, wanted in zip(encoded(IMAGES), full(IMAGES), strict=True):
        found, wanted = found.pred_instances, wanted.pred_instances
        assert len(found) > 5 and all(found[key].equal(wanted[key]) for key in ('bboxes', 'scores', 'labels'))
        assert found.masks == encode_mask_results(wanted.masks.numpy())
    cfg = Config.fromfile(files[0])
    loader = Runner.build_dataloader(cfg.test_dataloader)
    metrics, results = [], []
    for name, model in (('full', full.model), ('encoded', encoded.model)):
        evaluator = Evaluator({**cfg.test_evaluator, 'outfile_prefix': str(tmp_path / name)})
        evaluator.dataset_meta = loader.dataset.metainfo
        for batch in loader:
            evaluator.process(model.test_step(batch), batch)
        metrics.append(evaluator.evaluate(len(loader.dataset)))
        results.append((tmp_path / f'{name}.segm.json').read_text())
    assert metrics[0] == metrics[1] and 'coco/segm_mAP' in metrics[0]
    assert results[0] == results[1] and len(json.loads(results[0])) > 20


def test_list_runs_to_its_end_and_names_each_refused_image(served):
    detector = served('torch')
    wanted = detector(IMAGES[:3])
    images = [IMAGES[0], 'nowhere.jpg', IMAGES[1], [IMAGES[2]], IMAGES[2], np.full((9, 9, 3), None)]
    with pytest.raises(
        ImageListError,
        match=r'(?s)^3 of 6 images.*\n\[1\] nowhere.jpg.*\n\[3\] .*list.*\n\[5\] .* object',
    ) as caught:
        detector(images)
    assert {*caught.value.errors} == {1, 3, 5} and isinstance(caught.value, DataError)
    assert [result is None for result in caught.value.results] == [False, True, False, True, False, True]
    for found, expected in zip(filter(None, caught.value.results), wanted, strict=True):
        assert_same(found, expected, exact=True)
    assert detector([]) == []


@pytest.mark.parametrize('runtime', ['onnxruntime', 'openvino'])
def test_exported_file_is_served_without_slab_det(files, served, runtime):
    pytest.importorskip(runtime)
    example = runpy.run_path(str(EXAMPLES / 'serve_onnx.py'))
    detector = example['Detector'](files[2], runtime, threads=1)
    for image in IMAGES[:3]:
        expected = served(runtime)(image).pred_instances
        found = detector(cv2.imencode('.png', image)[1].tobytes())
        assert len(found) > 5 and [entry['label'] for entry in found] == expected.labels.tolist()
        assert [entry['name'] for entry in found] == ['abcd'[label] for label in expected.labels]
        np.testing.assert_allclose([entry['box'] for entry in found], expected.bboxes, atol=1e-3)
        np.testing.assert_allclose([entry['score'] for entry in found], expected.scores, atol=1e-5)
        masks = np.stack([entry['mask'] for entry in found])
        assert masks.any() and (masks != expected.masks.numpy()).mean() < 1e-5
    with pytest.raises(ValueError, match='not an image'):
        detector(b'no image')


# Runs a program where slab_det and what it needs are not installed.
WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys(('slab_det', 'torch', 'mmengine', 'mmcv', 'mmdet', 'onnx')))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def test_program_of_the_example_needs_nothing_of_slab_det(files, tmp_path):
    detector = runpy.run_path(str(EXAMPLES / 'serve_onnx.py'))['Detector'](files[2], threads=1)
    (tmp_path / 'photo.png').write_bytes(cv2.imencode('.png', IMAGES[0])[1])
    found = detector((tmp_path / 'photo.png').read_bytes())
    command = [EXAMPLES / 'serve_onnx.py', files[2], tmp_path / 'photo.png', '--min-score', found[1]['score']]
    run = subprocess.run(
        [sys.executable, '-c', WITHOUT, *map(str, command), '--threads', '1'], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    printed = [json.loads(line) for line in run.stdout.splitlines()]
    assert [entry['box'] for entry in printed] == [entry['box'] for entry in found[:2]]
    assert [entry['mask_pixels'] for entry in printed] == [entry['mask'].sum() for entry in found[:2]]


@pytest.mark.parametrize(('width', 'height', 'keep_ratio'), [(1333, 800, True), (77, 50, True), (64, 96, False)])
def test_example_resizes_as_mmdet_does(width, height, keep_ratio):
    prepare = runpy.run_path(str(EXAMPLES / 'serve_onnx.py'))['prepare']
    resize = dict(type='Resize', scale=[width, height], keep_ratio=keep_ratio)
    for image in IMAGES:
        wanted = TRANSFORMS.build(dict(resize, scale=(width, height)))(dict(img=image, img_shape=image.shape[:2]))
        pixels, factors = prepare(image, resize)
        assert (pixels[0] == wanted['img'].transpose(2, 0, 1)).all()
        np.testing.assert_allclose(factors, wanted['scale_factor'] * 2)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, call: Callable) -> Iterator[Callable[..., object]]:
    """A function: the application that ``slab-det serve`` with these arguments would serve in one process."""
    for package in ('fastapi', 'httpx', 'uvicorn'):
        if find_spec(package) is None:
            pytest.skip(f'{package} is not installed: make test installs it, or pip install -e ".[test]"')
    import uvicorn

    def make(*arguments: object) -> object:
        served = []
        monkeypatch.setattr(uvicorn, 'run', lambda app, host, port: served.append((app, host, port)))
        call('serve.py', *map(str, arguments), '--processes', '1')
        ((app, host, port),) = served
        assert (host, port) == ('127.0.0.1', 8000), 'reached from this machine alone'
        return app

    yield make
    # The command leaves what the process holds out of garbage collection, because its process ends.
    gc.unfreeze()


@pytest.mark.parametrize(('runtime', 'masks'), [('torch', 'full'), ('torch', 'rle'), ('onnxruntime', 'rle')])
def test_server_answers_with_the_objects_of_load_detector(files, served, server, runtime, masks):
    from fastapi.testclient import TestClient

    weights, device = (files[1], ('--device', 'cpu')) if runtime == 'torch' else (files[2], ())
    app = server(files[0], weights, '--runtime', runtime, '--masks', masks, '--threads', 1, *device)
    with TestClient(app) as client:
        assert client.get('/healthz').json() == dict(status='ok', classes=['a', 'b', 'c', 'd'])
        for image in IMAGES[:2]:
            expected = served(runtime)(image).pred_instances
            content = cv2.imencode('.png', image)[1].tobytes()
            answer = client.post('/detect', content=content).json()
            assert (answer['height'], answer['width']) == image.shape[:2]
            found = answer['detections']
            assert len(found) > 5 and [entry['label'] for entry in found] == expected.labels.tolist()
            assert [entry['name'] for entry in found] == ['abcd'[label] for label in expected.labels]
            assert [entry['box'] for entry in found] == expected.bboxes.tolist()
            assert [entry['score'] for entry in found] == expected.scores.tolist()
            decoded = np.stack([decode(entry['mask']) for entry in found])
            assert (decoded == expected.masks.numpy()).all()
            few = client.post('/detect', params=dict(min_score=found[1]['score']), content=content).json()
            assert few['detections'] == found[:2]


def write_folder(folder: Path, files: tuple[Path, Path, Path], runtime: str = 'torch') -> None:
    """Makes what optimize leaves of a folder."""
    weights = files[1] if runtime == 'torch' else files[2]
    for file in (files[0], weights):
        shutil.copy(file, folder)
    form = dict(key='chosen', runtime=runtime, precision='float32', variant=[], files=[files[0].name, weights.name])
    write_record(
        folder / OPTIMIZE_JSON, dict(recommended='chosen', forms=[form], device='cpu', threads=2, max_loss=0.5)
    )


@pytest.mark.parametrize('runtime', ['torch', 'onnxruntime'])
def test_server_takes_a_folder_of_optimize(files, served, server, tmp_path, runtime):
    from fastapi.testclient import TestClient

    write_folder(tmp_path, files, runtime)
    with TestClient(server(tmp_path, '--threads', 1, '--form', 'chosen')) as client:
        answer = client.post('/detect', content=cv2.imencode('.png', IMAGES[0])[1].tobytes()).json()
    expected = served(runtime)(IMAGES[0]).pred_instances
    assert [entry['box'] for entry in answer['detections']] == expected.bboxes.tolist()


def test_test_runs_a_folder_on_the_device_of_its_measurement(files, call, tmp_path, monkeypatch):
    write_folder(tmp_path, files)
    weights = torch.load(files[1], weights_only=False)
    weights['meta']['dataset_meta'] = SyntheticShapes.METAINFO
    torch.save(weights, tmp_path / files[1].name)
    # In place of a GPU, to which the runner moves every model.
    monkeypatch.setattr('mmengine.runner.runner.get_device', lambda: 'cpu:0')
    devices, move = [], BaseModel.to
    monkeypatch.setattr(BaseModel, 'to', lambda model, *device: devices.append(*device) or move(model, *device))
    call('test.py', tmp_path, '--work-dir', 'tested', '--cfg-options', 'test_evaluator.metric=bbox')
    assert [str(device) for device in devices] == ['cpu:0', 'cpu']


def test_server_refuses_what_is_no_small_image_and_goes_on(files, server):
    from fastapi.testclient import TestClient

    content = cv2.imencode('.png', IMAGES[0])[1].tobytes()
    app = server(files[0], files[1], '--device', 'cpu', '--max-megabytes', len(content) / 2**20)
    with TestClient(app) as client:
        # The second one says nothing of its length.
        for large in (content + b' ', iter([content, b' '])):
            answer = client.post('/detect', content=large)
            assert answer.status_code == 413 and 'send a smaller one' in answer.json()['detail']
        for bad, message in ((b'', 'empty'), (b'no image', 'not an image'), (content[:300], 'damaged')):
            answer = client.post('/detect', content=bad)
            assert answer.status_code == 422 and message in answer.json()['detail'], answer.json()
        assert client.post('/detect', params=dict(min_score=2), content=content).status_code == 422
        assert client.get('/detect').status_code == 405
        with ThreadPoolExecutor(4) as pool:
            answers = [*pool.map(lambda _: client.post('/detect', content=content).json(), range(8))]
        assert answers[0]['detections'] and answers == answers[:1] * 8


def test_server_does_not_start_without_a_detector_of_instances(files, call, tmp_path, monkeypatch):
    write_folder(tmp_path, files)
    for arguments, message in (
        ((files[0], tmp_path / 'nowhere.pth'), 'nowhere.pth'),
        ((files[0],), 'lacks weights'),
        ((tmp_path, '--dtype', 'bfloat16'), 'leave dtype= out'),
        ((tmp_path, '--form', 'other'), "no files of a form 'other'; its forms are chosen"),
    ):
        assert message in call('serve.py', *arguments, code=1).err, arguments
    model, steps = segmenter('MaskFormer'), find_test_pipeline(Config.fromfile(files[0]))
    monkeypatch.setitem(model.panoptic_fusion_head.test_cfg, 'instance_on', False)
    monkeypatch.setattr(slab_det, 'load_detector', lambda *_, **__: ServedDetector(model, steps))
    error = call('serve.py', *files[:2], code=1).err
    assert 'no instances' in error and 'set test_cfg.instance_on' in error


def test_signals_end_a_server_process_that_loads_its_detector(monkeypatch):
    """uvicorn's handlers would wait for the detector; they are back when it is loaded."""
    numbers = signal.SIGINT, signal.SIGTERM
    monkeypatch.setattr('slab_det.cli.serve.create_worker', lambda: [*map(signal.getsignal, numbers)])
    before = [signal.signal(number, lambda *_: None) for number in numbers]
    held_back = [*map(signal.getsignal, numbers)]
    try:
        assert slab_det_command.create_worker() == [signal.SIG_DFL] * 2
        assert [*map(signal.getsignal, numbers)] == held_back
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_the_image_serves_without_git_in_two_processes(files, served, tmp_path):
    """No container runs here: the commands of the Dockerfile run in a copy of what it copies, at another port.

    Each process is a new interpreter, which loads the detector by itself; SIGTERM ends them all.
    """
    root, model = CONFIGS.parent, tmp_path / 'model'
    text = (root / 'Dockerfile').read_text()
    copied = re.findall(r'^COPY (?:--\S+ )*(.*) \S+$', text, re.MULTILINE)
    assert all((root / name).exists() for names in copied for name in names.split())
    for name in ('slab_det', 'tools'):
        shutil.copytree(root / name, tmp_path / name)
    shutil.copy(root / 'slab_det_command.py', tmp_path)
    model.mkdir()
    write_folder(model, files)
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = str(free.getsockname()[1])
    healthy, serve = (
        [word.replace('/model', str(model)).replace('8000', port) for word in json.loads(command)]
        for command in re.findall(r'CMD (\[.*\])$', text, re.MULTILINE)
    )
    assert healthy[0] == serve[0] == 'python' and f'EXPOSE {port}' in text.replace('8000', port)
    environment = {**os.environ, 'PYTHONPATH': str(tmp_path)}
    command, log = [sys.executable, *serve[1:], '--processes', '2', '--port', port], (tmp_path / 'log').open('w+')
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=log, stdout=log) as run:
        try:
            deadline = time.monotonic() + 300
            while subprocess.run([sys.executable, *healthy[1:]], capture_output=True).returncode:
                assert run.poll() is None and time.monotonic() < deadline, (log.seek(0), log.read())
                time.sleep(0.5)
            content = cv2.imencode('.png', IMAGES[0])[1].tobytes()
            with urlopen(Request(f'http://127.0.0.1:{port}/detect', content), timeout=60) as answer:
                found = json.load(answer)['detections']
        finally:
            run.send_signal(signal.SIGTERM)
            run.wait(60)
    np.testing.assert_allclose(
        [entry['box'] for entry in found], served('torch')(IMAGES[0]).pred_instances.bboxes, atol=0.01
    )


def test_unfused_weights_are_fused_and_deployed_in_a_dtype(module_run_cfg, tmp_path):
    cfg = module_run_cfg(**SMALL_SWIN)
    torch.save(dict(state_dict=as_trained(MODELS.build(cfg.model)).state_dict()), tmp_path / 'last.pth')
    detector = slab_det.load_detector(cfg, tmp_path / 'last.pth', dtype=torch.bfloat16)
    assert detector.model.fusion_report.select('folded')
    assert detector.model.backbone.patch_embed.projection.weight.dtype == torch.bfloat16
    assert isinstance(detector(IMAGES[0]), DetDataSample)
    model = MODELS.build(module_run_cfg(**{**SMALL_SWIN, 'norm_cfg': dict(type='LN')}).model)
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'layernorm.pth')
    with pytest.raises(FusionError, match='no statistics of data'):
        slab_det.load_detector(cfg, tmp_path / 'layernorm.pth')


@pytest.mark.parametrize(
    ('file', 'options', 'error', 'message'),
    [
        (2, dict(), CheckpointError, 'cannot be read as a checkpoint'),
        (1, dict(masks='RLE'), DeploymentError, "masks='RLE' is not one of"),
        (1, dict(threads=2), ExportError, 'threads= is not an option of the runtime torch, which takes dtype$'),
        (1, dict(runtime='onnxruntime'), ExportError, 'was not written by slab-det export'),
        (2, dict(runtime='onnxruntime', device='cpu'), ExportError, "device='cpu' is for"),
        (2, dict(runtime='onnxruntime', masks='RLE'), ExportError, "masks='RLE' is not one of"),
        (2, dict(runtime='onnxruntime', dtype=torch.int8), ExportError, 'dtype= .* which takes threads and precision'),
    ],
    ids=str,
)
def test_wrong_file_or_option_is_refused(files, file, options, error, message):
    with pytest.raises(error, match=message):
        slab_det.load_detector(files[0], files[file], **options)


def test_a_missing_config_is_named(files):
    with pytest.raises(ConfigError, match=r'missing\.py: there is no'):
        slab_det.load_detector('missing.py', files[1])


def test_gray_detector_is_deployed_exported_and_served(module_run_cfg, tmp_path):
    cfg = module_run_cfg(**SMALL_SWIN, in_channels=1)
    cfg.model.data_preprocessor.update(mean=[120.0], std=[60.0], bgr_to_rgb=False)
    cfg.test_dataloader.dataset.pipeline[0].color_type = 'grayscale'
    torch.save(dict(state_dict=as_trained(MODELS.build(cfg.model)).state_dict()), tmp_path / 'gray.pth')
    model = build_detector(cfg, str(tmp_path / 'gray.pth'))
    export_onnx(model, tmp_path / 'gray.onnx')
    runtime = load_runtime(tmp_path / 'gray.onnx', threads=1)
    assert runtime.metadata['image']['channel_order'] == 'gray'
    assert check_parity(model, runtime, random_images([(96, 128)], channels=1))[0].conclusive
    gray = cv2.cvtColor(IMAGES[0], cv2.COLOR_BGR2GRAY)
    results = []
    for weights, options in (('gray.pth', dict(device='cpu')), ('gray.onnx', dict(runtime='onnxruntime', threads=1))):
        detector = slab_det.load_detector(cfg, tmp_path / weights, **options)
        forms = gray, gray[..., None], PIL.Image.fromarray(gray), cv2.imencode('.png', gray)[1].tobytes()
        first, *others = detector([*forms])
        for other in others:
            assert_same(other, first, exact=True)
        results.append(first)
        if weights == 'gray.pth':
            assert detector.model.deployment_check.difference < 1e-3
            measured = slab_det.measure_latency(dict(gray=detector.model), size=(64, 96), rounds=1, warmup=1)
            assert measured['gray'].detections is not None
    assert_same(*results, exact=False)


def with_settings(config: Path, **settings: object) -> Config:
    """The fused config with other settings of the detector, such as ``rcnn__score_thr=0.3``."""
    cfg = Config.fromfile(config)
    cfg.merge_from_dict({f'model.model.{key.replace("__", ".")}': value for key, value in settings.items()})
    return cfg


def test_file_follows_thresholds_and_limits_of_the_config(files, served):
    settings = dict(score_thr=0.3, max_per_img=6, mask_thr_binary=0.7)
    cfg = with_settings(files[0], **{f'test_cfg__rcnn__{key}': value for key, value in settings.items()})
    wanted = slab_det.load_detector(cfg, files[1], device='cpu')
    found = slab_det.load_detector(cfg, files[2], 'onnxruntime', threads=1)
    for image in IMAGES[:3]:
        assert_same(found(image), wanted(image), exact=False)
        assert len(found(image).pred_instances) <= 6 < len(served('onnxruntime')(image).pred_instances)


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        (dict(test_cfg__rcnn__nms__iou_threshold=0.3), 'test_cfg.rcnn.nms=.*0.5.*0.3.*would find other objects'),
        (dict(test_cfg__rcnn__nms__type='soft_nms'), 'test_cfg.rcnn.nms=.*soft_nms'),
        (dict(test_cfg__rcnn__max_per_img=21), 'test_cfg.rcnn.max_per_img=20, and this config 21'),
        (dict(test_cfg__rcnn__max_per_img=-1), 'test_cfg.rcnn.max_per_img=20, and this config -1'),
        (dict(test_cfg__rcnn__max_per_img=None), 'test_cfg.rcnn.max_per_img=20, and this config None'),
        (dict(test_cfg__rcnn__mask_thr_binary=-1), 'test_cfg.rcnn.mask_thr_binary=0.5, and this config -1'),
        (dict(test_cfg__rpn__nms_pre=50), 'test_cfg.rpn.nms_pre=60, and this config 50'),
        (dict(test_cfg__rpn__max_per_img=30), 'test_cfg.rpn.max_per_img=40, and this config 30'),
        (dict(data_preprocessor__mean=[0, 0, 0]), 'normalization.mean=.123.*, and this config .0, 0, 0'),
        (dict(data_preprocessor__std=[1, 1, 1]), 'normalization.std=.58.*, and this config .1, 1, 1'),
        (dict(data_preprocessor__bgr_to_rgb=False), 'normalization.channel_order=RGB, and this config BGR'),
        (dict(data_preprocessor__pad_size_divisor=64), 'padding.size_divisor=32, and this config 64.*export again'),
    ],
    ids=str,
)
def test_settings_that_the_file_cannot_follow_are_refused(files, served, settings, message):
    cfg, metadata = with_settings(files[0], **settings), served('onnxruntime').model.runtime.metadata
    with pytest.raises(ExportError, match=f'model.onnx was exported with {message}'):
        follow_config('model.onnx', metadata, detector_settings(cfg))
    # Options beside the model of a FusedDetector are options of the model.
    beside = Config.fromfile(files[0])
    beside.merge_from_dict({f'model.{key.replace("__", ".")}': value for key, value in settings.items()})
    with pytest.raises(ExportError, match=f'model.onnx was exported with {message}'):
        follow_config('model.onnx', metadata, detector_settings(beside))
    # The settings are compared anew at each load.
    assert follow_config('model.onnx', metadata, detector_settings(Config.fromfile(files[0]))).score_thr is None


def test_file_exported_for_another_resize_is_refused(files):
    cfg = Config.fromfile(files[0])
    (resize,) = [step for step in cfg.test_dataloader.dataset.pipeline if step.type == 'Resize']
    resize.scale = (96, 80)
    with pytest.raises(ExportError, match='96, 80.*would find other objects'):
        slab_det.load_detector(cfg, files[2], 'onnxruntime', threads=1)
