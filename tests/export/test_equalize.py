"""Layers whose input channels have very different ranges are quantized with a scale for each channel."""

import json
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest

onnx = pytest.importorskip('onnx')
onnxruntime = pytest.importorskip('onnxruntime')

from slab_det.common.memory import memory_growth  # noqa: E402
from slab_det.export import quantize, quantize_onnx  # noqa: E402
from slab_det.export.equalize import equalize  # noqa: E402
from slab_det.export.in_onnxruntime import in_file_order  # noqa: E402
from slab_det.export.loaded_file import METADATA_KEY  # noqa: E402

CHANNELS, OUTPUTS = 16, 12
RANGES = np.logspace(-3, 1, CHANNELS).astype(np.float32)


def build(kind: str, ranges: np.ndarray):
    """A file of one layer, whose weights make every channel count the same."""
    make, rng = onnx.helper, np.random.default_rng(0)
    rows = (rng.normal(size=(CHANNELS, OUTPUTS)) / ranges[:, None]).astype(np.float32)
    weight = {'Conv': rows.T[:, :, None, None], 'Gemm': rows.T, 'MatMul': rows}[kind]
    source, before = 'image', []
    if kind != 'Conv':
        # Gemm reads (N, C), MatMul tokens of any rank.
        shape = np.array([-1, CHANNELS] if kind == 'Gemm' else [1, -1, CHANNELS], np.int64)
        before = [
            make.make_node('Transpose', ['image'], ['last'], perm=(0, 2, 3, 1)),
            make.make_node('Reshape', ['last', 'shape'], ['tokens']),
        ]
        source = 'tokens'
    layer = make.make_node(kind, [source, 'weight'], ['out'], 'layer', **dict(transB=1) if kind == 'Gemm' else {})
    constants = [onnx.numpy_helper.from_array(np.ascontiguousarray(weight), 'weight')]
    if before:
        constants.append(onnx.numpy_helper.from_array(shape, 'shape'))
    image = make.make_tensor_value_info('image', onnx.TensorProto.FLOAT, (1, CHANNELS, 'h', 'w'))
    out = make.make_tensor_value_info('out', onnx.TensorProto.FLOAT, None)
    graph = make.make_graph([*before, layer], 'graph', [image], [out], constants)
    model = make.make_model(graph, opset_imports=[make.make_opsetid('', 16)], ir_version=8)
    metadata = dict(precision='float32', image=dict(size_divisor=1))
    make.set_model_props(model, {METADATA_KEY: json.dumps(metadata)})
    return model


def pictures(ranges: np.ndarray, count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [(rng.normal(size=(1, CHANNELS, 8, 9)) * ranges[:, None, None]).astype(np.float32) for _ in range(count)]


def run(content: bytes, image: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(content, providers=['CPUExecutionProvider'])
    return session.run(None, {'image': image})[0]


@pytest.mark.parametrize('kind', ['Conv', 'Gemm', 'MatMul'])
def test_small_channels_with_large_weights_survive_int8(kind, tmp_path, monkeypatch):
    model, images = build(kind, RANGES), pictures(RANGES, 12)
    onnx.save(model, tmp_path / 'float.onnx')
    expected = run(model.SerializeToString(), images[-1])
    errors = []
    for scales in (True, False):
        if not scales:
            monkeypatch.setattr(quantize, 'equalize', lambda *_: ([], []))
        assert quantize_onnx(tmp_path / 'float.onnx', tmp_path / 'int8.onnx', images[:-1]) == ['layer']
        found = run((tmp_path / 'int8.onnx').read_bytes(), images[-1])
        errors.append(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    assert errors[0] < 0.05 < 0.5 < errors[1], errors
    assert equalize(model, ['layer'], images[:3]) == (['layer'], [])
    np.testing.assert_allclose(run(model.SerializeToString(), images[-1]), expected, rtol=1e-4, atol=1e-4)
    assert 'weight' not in {tensor.name for tensor in model.graph.initializer}, 'nothing reads the former weight'


def test_channels_of_like_ranges_are_left_alone():
    ranges = np.linspace(0.8, 1.2, CHANNELS).astype(np.float32)
    model = build('MatMul', ranges)
    before = model.SerializeToString()
    assert equalize(model, ['layer'], pictures(ranges, 3)) == ([], []) and model.SerializeToString() == before


def test_a_layer_whose_weights_cancel_stays_in_float32(tmp_path):
    """All channels are nearly equal, and the output is what remains of their large weighted sum."""
    model, rng = build('Conv', np.ones(CHANNELS, np.float32)), np.random.default_rng(2)
    weight = model.graph.initializer[0]
    rows = rng.normal(size=(OUTPUTS, CHANNELS)).astype(np.float32)
    rows -= rows.mean(1, keepdims=True)
    weight.CopyFrom(onnx.numpy_helper.from_array(100 * rows[:, :, None, None], 'weight'))
    shared = rng.normal(size=(3, 1, 1, 8, 9))
    images = [(x + 1e-3 * rng.normal(size=(1, CHANNELS, 8, 9))).astype(np.float32) for x in shared]
    onnx.save(model, tmp_path / 'float.onnx')
    assert quantize_onnx(tmp_path / 'float.onnx', tmp_path / 'int8.onnx', images) == []
    expected, found = (run((tmp_path / f'{name}.onnx').read_bytes(), images[0]) for name in ('float', 'int8'))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.skipif(not Path('/proc/self/clear_refs').exists(), reason='the peak of memory is that of Linux')
def test_values_behind_probes_are_freed_where_nodes_run_in_the_order_of_the_file():
    make, layers, nodes, outputs = onnx.helper, 24, [], []
    for i in range(layers):
        nodes.append(make.make_node('Sin', [f'x{i}' if i else 'image'], [f'x{i + 1}']))
        nodes.append(make.make_node('ReduceMax', [f'x{i + 1}'], [f'max{i}'], keepdims=0))
        outputs.append(make.make_tensor_value_info(f'max{i}', onnx.TensorProto.FLOAT, []))
    image = make.make_tensor_value_info('image', onnx.TensorProto.FLOAT, (1, 8, 512, 512))
    graph = make.make_graph(nodes, 'graph', [image], outputs)
    model = make.make_model(graph, opset_imports=[make.make_opsetid('', 16)], ir_version=8)
    with in_file_order():
        options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=['CPUExecutionProvider'])
    pixels = np.ones((1, 8, 512, 512), np.float32)
    with memory_growth('cpu') as growth:
        session.run(None, {'image': pixels})
    # Of 24 values; in ONNX Runtime's own order all of them.
    assert growth.megabytes < layers / 3 * pixels.nbytes / 1e6
    assert type(onnxruntime.SessionOptions()) is onnxruntime.SessionOptions


def test_threads_leave_the_session_options_of_onnx_runtime_as_they_were(monkeypatch):
    # Also where this test fails.
    monkeypatch.setattr(onnxruntime, 'SessionOptions', onnxruntime.SessionOptions)
    options, entered, leave = onnxruntime.SessionOptions, Event(), Event()

    def quantize_too() -> None:
        with in_file_order():
            entered.set()
            leave.wait(10)

    other = Thread(target=quantize_too)
    with in_file_order():
        other.start()
        # Time enough to enter the block too, if nothing keeps the other thread out.
        entered.wait(0.2)
    assert entered.wait(10)
    leave.set()
    other.join()
    assert onnxruntime.SessionOptions is options
