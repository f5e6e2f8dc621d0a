"""A RetinaNet as an ONNX file: the second family of heads."""

import random

import onnx
import pytest
import torch
from graph_cases import build, noise
from mmdet.models.dense_heads import RetinaHead
from mmdet.registry import MODELS
from mmengine.config import ConfigDict
from zoo import zoo_cfg

from slab_det.deployment.export import (
    ExportError,
    build_graph,
    check_parity,
    export_onnx,
    load_runtime,
    random_images,
)
from slab_det.deployment.export.quantize import FLOAT_LAYERS
from slab_det.deployment.export.settings import follow_config


def finding(model):
    """The model with scores from 0.1 to 0.9, and boxes near their anchors."""
    for layer, std in ((model.bbox_head.retina_cls, 0.02), (model.bbox_head.retina_reg, 0.01)):
        torch.nn.init.normal_(layer.weight, std=std)
    torch.nn.init.zeros_(model.bbox_head.retina_cls.bias)
    return model


@pytest.fixture(scope='module')
def detector():
    torch.manual_seed(0)
    return finding(build('RetinaNet', random.Random(0)))


@pytest.fixture(scope='module')
def file(detector, tmp_path_factory):
    path = tmp_path_factory.mktemp('retinanet') / 'model.onnx'
    export_onnx(detector, path)
    return path


@torch.no_grad()
def test_graph_finds_what_mmdet_finds(detector):
    for size in ((64, 96), (131, 75)):
        data = noise(size, size)
        image = data['inputs'][0][None].float()
        expected = detector(**detector.data_preprocessor(data, False), mode='predict')[0].pred_instances
        boxes, scores, labels = build_graph(detector)(image)
        assert len(expected) > 5, size
        assert labels.equal(expected.labels), size
        torch.testing.assert_close(scores, expected.scores)
        torch.testing.assert_close(boxes, expected.bboxes, rtol=1e-5, atol=1e-4)


def test_file_computes_what_the_detector_computes(detector, file):
    runtime = load_runtime(file, threads=1)
    (check,) = check_parity(detector, runtime, random_images([(96, 160)]))
    assert check.num_values > 100
    (image,) = random_images([(75, 131)])
    nothing = runtime.with_threshold(2.0)(image)
    assert {name: values.shape for name, values in nothing.items()} == dict(boxes=(0, 4), scores=(0,), labels=(0,))


@pytest.mark.parametrize('name', ['pvt/retinanet_pvt-t_fpn_1x_coco', 'pvt/retinanet_pvtv2-b0_fpn_1x_coco'])
def test_file_of_a_pvt_of_mmdet_takes_every_size(name, tmp_path):
    torch.manual_seed(0)
    model = finding(MODELS.build(zoo_cfg(name)).eval())
    export_onnx(model, tmp_path / 'model.onnx')
    checks = check_parity(
        model, load_runtime(tmp_path / 'model.onnx', threads=1), random_images([(96, 160), (131, 99)])
    )
    assert all(check.conclusive and check.num_values > 100 for check in checks)


def test_file_follows_the_settings_that_it_can(detector, file):
    metadata, cfg = load_runtime(file).metadata, detector.bbox_head.test_cfg
    own = dict(test_cfg=cfg, data_preprocessor=dict(type='DetDataPreprocessor'))
    metadata |= dict(normalization=dict(channel_order='BGR'), padding=dict(size_divisor=1, value=0.0))
    assert metadata['family'] == 'retinanet' and follow_config('model.onnx', metadata, own) == (None, None, None)
    own['test_cfg'] = ConfigDict(cfg, score_thr=0.3, max_per_img=7)
    assert follow_config('model.onnx', metadata, own) == (0.3, 7, None)
    own['test_cfg'] = ConfigDict(cfg, nms_pre=60)
    with pytest.raises(ExportError, match=rf'with test_cfg.nms_pre={cfg.nms_pre}, and this config 60: the file would'):
        follow_config('model.onnx', metadata, own)


def test_last_layers_stay_float32_in_int8(file):
    nodes = [node.name for node in onnx.load(file).graph.node if node.op_type == 'Conv' and 'bbox_head' in node.name]
    last = [name for name in nodes if any(layer in name for layer in FLOAT_LAYERS)]
    assert len(last) == 2 * 5 and all('_convs' in name for name in {*nodes} - {*last})


def test_unsupported_part_is_named(tmp_path):
    model = build('RetinaNet', random.Random(0))

    def refuses(message):
        with pytest.raises(ExportError, match=message):
            export_onnx(model, tmp_path / 'model.onnx')

    cfg = model.bbox_head.test_cfg
    cfg.min_bbox_size = 4
    refuses('a min_bbox_size of at most 0 in test_cfg')
    cfg.max_per_img = -1
    refuses('a positive nms_pre and max_per_img in test_cfg')
    cfg.nms.class_agnostic = True
    refuses('plain NMS per class in the test_cfg of the bbox_head')
    model.bbox_head.use_sigmoid_cls = False
    refuses('a bbox_head with sigmoid scores')
    model.bbox_head.__class__ = type('OtherHead', (RetinaHead,), dict(forward_single=lambda self, x: (x, x, x)))
    refuses('a graph needs RetinaHead as bbox_head, not OtherHead')
    model.__class__ = type('Other', (type(model),), dict(predict=lambda self: None))
    refuses('a detector that predicts as TwoStageDetector or SingleStageDetector does')
