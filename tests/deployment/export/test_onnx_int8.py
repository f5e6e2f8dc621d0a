"""Static quantization of an exported file, and the file in the place of a model."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from conftest import randomize
from mmdet.registry import MODELS
from mmengine.runner import Runner

import slab_det
from slab_det.deployment.export import ExportError, export_onnx, load_runtime, quantize_onnx, random_images
from slab_det.deployment.export.parity import match_detections

SIZE = (96, 128)


@pytest.fixture
def detector(small_detector_cfg):
    cfg = small_detector_cfg()
    cfg.test_cfg.rpn.update(nms_pre=60, max_per_img=40)
    model = MODELS.build(cfg)
    randomize(model, 0)
    for layer in (model.rpn_head.rpn_reg, model.roi_head.bbox_head.fc_reg):
        layer.weight.data.mul_(0.1)
    slab_det.set_gamma(model, 0)
    return model.eval()


def int8_weights(path: Path) -> dict[str, set[int]]:
    """The nodes that read a dequantized int8 weight, and how many scales that weight has."""
    graph = onnx.load(path).graph
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    sizes = {tensor.name: int(np.prod(tensor.dims)) for tensor in graph.initializer}
    weights = {
        node.output[0]: sizes[node.input[1]]
        for node in graph.node
        if node.op_type == 'DequantizeLinear' and types.get(node.input[0]) == onnx.TensorProto.INT8
    }
    return {
        node.name: weights[node.input[1]] for node in graph.node if len(node.input) > 1 and node.input[1] in weights
    }


def test_layers_with_weights_run_in_int8_and_the_answers_in_float(detector, tmp_path):
    source, target = tmp_path / 'model.onnx', tmp_path / 'int8.onnx'
    export_onnx(detector, source, 'backbone+neck+rpn')
    nodes = quantize_onnx(source, target, random_images([SIZE, (75, 131)]))
    quantized = int8_weights(target)
    assert set(quantized) == set(nodes)
    names = ' '.join(quantized)
    for part in ('qkv', 'proj/', 'ffn', 'downsample', 'lateral_convs', 'fpn_convs', 'rpn_conv'):
        assert part in names, part
    for part in ('projection', 'rpn_cls', 'rpn_reg'):
        assert part not in names, part
    # Per channel: qkv of the first stage has 3 * 8 of them.
    assert next(count for name, count in quantized.items() if 'stages.0' in name and 'qkv' in name) == 24
    image = random_images([(131, 100)])[0]
    exact, rounded = (load_runtime(path, threads=1).run(image) for path in (source, target))
    for name, value in exact.items():
        error = np.linalg.norm(rounded[name] - value) / np.linalg.norm(value - value.mean())
        assert 1e-4 < error < 0.2, (name, error)


def test_named_layers_stay_in_float(detector, tmp_path):
    export_onnx(detector, tmp_path / 'model.onnx', 'backbone+neck+rpn')
    nodes = quantize_onnx(
        tmp_path / 'model.onnx', tmp_path / 'int8.onnx', random_images([SIZE]), float_layers=('backbone',)
    )
    assert nodes and not any('backbone' in node for node in nodes)
    assert any('rpn_reg' in node for node in nodes)


def test_file_takes_the_place_of_a_model(detector, small_run_cfg, tmp_path):
    export_onnx(detector, tmp_path / 'model.onnx')
    exported = MODELS.build(dict(type='ExportedDetector', file=str(tmp_path / 'model.onnx'), threads=1))
    cfg = small_run_cfg()
    compared = 0
    for data in Runner.build_dataloader(cfg.test_dataloader):
        with torch.no_grad():
            expected = detector.test_step({**data, 'data_samples': [s.clone() for s in data['data_samples']]})
        for found, wanted in zip(exported.test_step(data), expected, strict=True):
            found, wanted = found.pred_instances, wanted.pred_instances
            assert found.masks.shape[1:] == wanted.masks.shape[1:]
            i, j = match_detections(*(dict(boxes=p.bboxes, scores=p.scores, labels=p.labels) for p in (found, wanted)))
            assert len(i) >= 0.98 * len(wanted) and abs(len(found) - len(wanted)) <= 1
            assert (found.bboxes[i] - wanted.bboxes[j]).abs().max() < 0.05
            assert (found.masks[i] != wanted.masks[j]).float().mean() < 1e-3
            assert found.masks.any()
            compared += len(i)
    assert compared > 20


def test_scope_without_boxes_is_refused_as_a_model(detector, tmp_path):
    export_onnx(detector, tmp_path / 'model.onnx', 'backbone+neck+rpn')
    with pytest.raises(ExportError, match='--scope detector'):
        MODELS.build(dict(type='ExportedDetector', file=str(tmp_path / 'model.onnx')))
    with pytest.raises(ExportError, match='use runtime openvino'):
        load_runtime(tmp_path / 'model.onnx', precision='bf16')


def test_openvino_finds_what_onnx_runtime_finds(detector, tmp_path):
    pytest.importorskip('openvino')
    export_onnx(detector, tmp_path / 'model.onnx', 'backbone+neck+rpn')
    image = random_images([(131, 100)])[0]
    expected = load_runtime(tmp_path / 'model.onnx', threads=1).run(image)
    found = load_runtime(tmp_path / 'model.onnx', 'openvino', threads=1).run(image)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= 1e-4 * np.abs(value).max(), name
