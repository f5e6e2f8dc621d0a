"""Kernels at widths that few models have, against float64: some of them are wrong on some processors only."""

import contextlib
import copy

import numpy as np
import onnx
import pytest
import torch
from conftest import as_trained
from mmdet.registry import MODELS

import slab_det
from slab_det.export import ExportError, export_onnx, int8_sums, load_runtime, loaded_file, quantize_onnx
from slab_det.export.extras import find_loader
from slab_det.export.int8_sums import SIDE, cuts_off_int8_sums

BFLOAT16 = torch.finfo(torch.bfloat16).eps


def rms(found, expected):
    found, expected = (torch.as_tensor(x).double() for x in (found, expected))
    return ((found - expected).norm() / expected.norm()).item()


def test_exported_backbone(small_detector_cfg, tmp_path, width=20):
    ort = pytest.importorskip('onnxruntime')
    pytest.importorskip('openvino')
    cfg = small_detector_cfg(embed_dims=width, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 4))
    cfg.neck.in_channels = [width, 2 * width, 4 * width, 8 * width]
    model, source, int8 = slab_det.fuse(as_trained(MODELS.build(cfg))), tmp_path / 'model.onnx', tmp_path / 'int8.onnx'
    export_onnx(model, source, scope='backbone')
    images = [np.random.default_rng(seed).uniform(0, 255, (1, 3, 64, 96)).astype(np.float32) for seed in range(3)]
    quantize_onnx(source, int8, images)
    # Without its optimizer, ONNX Runtime computes what the file says: in float32, between rounding to int8 and back.
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain = ort.InferenceSession(int8, options, providers=['CPUExecutionProvider'])
    image, names = images[0], [output.name for output in onnx.load(source).graph.output]
    exact = dict(zip(names, _in_float64(model, image), strict=True))
    in_int8 = dict(zip(names, plain.run(names, dict(image=image)), strict=True))
    steps = max(rms(in_int8[name], exact[name]) for name in names)
    forms = {
        'ONNX Runtime': (load_runtime(source), 1e-5),
        'OpenVINO': (load_runtime(source, 'openvino'), 1e-5),
        # Values between two steps may round to either of them, and later layers spread the difference.
        'ONNX Runtime in int8': (load_runtime(int8), 2 * steps),
        'OpenVINO in int8': (load_runtime(int8, 'openvino'), 2 * steps),
    }
    # Some twenty layers round to bfloat16. oneDNN may be told to leave out the instructions that OpenVINO finds.
    with contextlib.suppress(ExportError):
        forms['OpenVINO in bfloat16'] = load_runtime(source, 'openvino', precision='bfloat16'), 4 * BFLOAT16
    assert steps < 0.1, 'the calibration itself fails'
    for form, (runtime, bound) in forms.items():
        found = runtime.run(image)
        errors = {name: rms(found[name], exact[name]) for name in names}
        assert max(errors.values()) < bound, (form, errors, bound)


def test_a_file_whose_sums_do_not_fit_this_cpu_is_told(small_detector, tmp_path, monkeypatch, logged):
    pytest.importorskip('onnxruntime')
    source, int8 = tmp_path / 'model.onnx', tmp_path / 'int8.onnx'
    export_onnx(slab_det.fuse(small_detector(depths=(1, 1, 1, 1))), source, scope='backbone')
    assert not load_runtime(source).metadata.get('int8_weight_bits')
    # A CPU without VNNI.
    monkeypatch.setattr(loaded_file, 'cuts_off_int8_sums', lambda runtime: True)
    for bits, largest, is_cut in ((7, 64, False), (8, 127, True)):
        quantize_onnx(source, int8, [np.zeros((1, 3, 32, 32), np.float32)], reduce_range=bits == 7)
        assert load_runtime(int8).metadata['int8_weight_bits'] == bits
        assert ('export it again with --int8 --reduce-range' in logged.text) == is_cut, bits
        weights = [onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(int8).graph.initializer]
        assert max(np.abs(weight).max() for weight in weights if weight.dtype == np.int8) == largest


@pytest.mark.parametrize('runtime', ['onnxruntime', 'openvino'])
def test_runtimes_are_asked_whether_sums_fit(runtime, monkeypatch):
    pytest.importorskip(runtime)
    plain = find_loader(runtime)

    def cut(source, **options):
        run = plain(source, **options)
        return lambda image: [np.minimum(output, SIDE // 2 * 2**15) for output in run(image)]

    # ONNX Runtime has its own kernels, and may cut off sums too.
    assert cuts_off_int8_sums(runtime) in (True, False)
    monkeypatch.setattr(int8_sums, 'find_loader', lambda name: cut)
    assert cuts_off_int8_sums.__wrapped__(runtime)


@torch.no_grad()
def _in_float64(model, image):
    model = copy.deepcopy(model).double()
    inputs = model.data_preprocessor(dict(inputs=[torch.from_numpy(image[0]).double()], data_samples=None))['inputs']
    return model.backbone(inputs.double())
