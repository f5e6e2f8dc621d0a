"""Families of heads as ONNX files."""

import copy
import random

import numpy as np
import onnx
import pytest
import torch
from graph_cases import CONFIGS, build, noise
from mmdet.models.dense_heads import AnchorHead, RetinaHead
from mmdet.registry import MODELS
from mmengine.config import ConfigDict
from zoo import zoo_cfg

from slab_det.compare.difference import match_detections, relative_difference
from slab_det.export import (
    ExportError,
    build_graph,
    check_parity,
    export_onnx,
    load_runtime,
    random_images,
)
from slab_det.export.exported_detector import ExportedDetector
from slab_det.export.quantize import FLOAT_LAYERS
from slab_det.export.settings import follow_config
from slab_det.families import Objects, find_family

# test_export.py exports Mask R-CNN and Faster R-CNN.
KINDS = [kind for kind in CONFIGS if kind not in ('Mask R-CNN', 'Faster R-CNN', 'Cascade R-CNN')]
SIZES = ((96, 64), (75, 99))


def finding(model):
    """The model with scores from 0.1 to 0.9, and boxes near their anchors."""
    for name, layer in model.named_modules():
        if {*name.split('.')} & {*find_family(model).predictors} and hasattr(layer, 'weight'):
            std = 0.05 if 'reg' in name else 0.3
            torch.nn.init.normal_(layer.weight, std=std * layer.weight[0].numel() ** -0.5)
            torch.nn.init.zeros_(layer.bias)
    return model


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
    """Makes a detector and its file, once of each kind."""
    made = {}

    def make(kind):
        if kind not in made:
            torch.manual_seed(0)
            detector, file = finding(build(kind, random.Random(0))), tmp_path_factory.mktemp('heads') / 'model.onnx'
            if hasattr(detector, 'rpn_head'):
                # Heads of regions in float64 take seconds.
                detector.rpn_head.test_cfg.max_per_img = detector.roi_head.test_cfg.max_per_img = 20
            export_onnx(detector, file)
            made[kind] = detector, file
        return made[kind]

    return make


@pytest.mark.parametrize('kind', KINDS)
@torch.no_grad()
def test_graph_finds_what_mmdet_finds(kind, exported):
    detector, _ = exported(kind)
    for size in ((64, 96), (131, 75)):
        data = noise(size, size)
        image = data['inputs'][0][None].float()
        expected = detector(**detector.data_preprocessor(data, False), mode='predict')[0].pred_instances
        boxes, scores, labels, *_ = build_graph(detector)(image)
        assert len(expected) > 5, size
        assert labels.equal(expected.labels), size
        torch.testing.assert_close(scores, expected.scores)
        torch.testing.assert_close(boxes, expected.bboxes, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize('kind', KINDS)
def test_file_computes_what_the_detector_computes(kind, exported):
    detector, file = exported(kind)
    runtime, other = (load_runtime(file, name, threads=1) for name in ('onnxruntime', 'openvino'))
    assert runtime.metadata['family'] == find_family(detector).name
    images = random_images(SIZES)
    checks = check_parity(detector, runtime, images)
    assert all(check.conclusive and check.num_values > 100 for check in checks), checks
    for image in images:
        found, again = ([torch.from_numpy(x) for x in each.run(image).values()] for each in (runtime, other))
        *matched, share = match_detections(found, again, side=99)
        assert share == 0 and relative_difference(*matched) < 1e-4, image.shape
    (image,) = random_images([(66, 50)])
    nothing = runtime.with_threshold(2.0).run(image)
    # The padded image of 96x64, at every eighth pixel.
    masks = (0, 12, 8) if kind == 'RTMDet-Ins' else (0, 28, 28)
    shapes = dict(boxes=(0, 4), scores=(0,), labels=(0,), mask_logits=masks)
    assert {name: values.shape for name, values in nothing.items()} == {name: shapes[name] for name in nothing}


# Distances are exponentials or multiples of a stride; masks are drawn by kernels that the head predicts.
@pytest.mark.parametrize('kind', ['FCOS', 'RTMDet-Ins'])
def test_a_float16_file_differs_by_what_rounding_explains(kind, exported, tmp_path):
    detector, _ = exported(kind)
    export_onnx(detector, tmp_path / 'half.onnx', dtype=torch.float16)
    checks = check_parity(detector, load_runtime(tmp_path / 'half.onnx', threads=1), random_images(SIZES))
    assert all(check.num_values > 100 for check in checks) and any(check.conclusive for check in checks), checks


def test_parity_holds_where_a_centerness_takes_scores_below_the_threshold(exported, monkeypatch):
    detector, file = exported('FCOS')
    monkeypatch.setitem(detector.bbox_head.test_cfg, 'score_thr', 0.5)
    runtime, images = load_runtime(file, threads=1, score_thr=0.5), random_images(SIZES[:1])
    assert (runtime.run(images[0])['scores'] < 0.5).mean() > 0.5
    (check,) = check_parity(detector, runtime, images)
    assert check.conclusive and check.same and check.num_values > 100


def test_a_file_with_masks_of_the_whole_image_is_served(exported):
    detector, file = exported('RTMDet-Ins')
    data = noise((64, 96), (90, 120))
    expected = detector.test_step(copy.deepcopy(data))[0].pred_instances
    (found,) = ExportedDetector(str(file), threads=1)(**data)
    masks = found.pred_instances.masks
    assert masks.shape == expected.masks.shape == (len(expected), 90, 120) and 0.1 < masks.float().mean() < 0.9
    assert (masks != expected.masks).float().mean() < 1e-3
    with pytest.raises(ExportError, match="masks='rle' encodes masks of boxes"):
        ExportedDetector(str(file), masks='rle', threads=1)


def test_file_of_a_neck_that_doubles_maps_takes_multiples_of_32(tmp_path):
    """As mmdet's RTMDet, whose test pipeline pads."""
    torch.manual_seed(0)
    detector, path = finding(build('RTMDet', random.Random(0))), tmp_path / 'model.onnx'
    detector.data_preprocessor.pad_size_divisor = 1
    export_onnx(detector, path)
    runtime = load_runtime(path, threads=1)
    (check,) = check_parity(detector, runtime, random_images([(70, 99)]))
    assert check.conclusive and check.what.startswith('64x96')
    with pytest.raises(ExportError, match='multiples of 32, .* not 64x99: set pad_size_d'):
        runtime.run(np.zeros((1, 3, 64, 99), np.float32))


@pytest.mark.parametrize('name', ['pvt/retinanet_pvt-t_fpn_1x_coco', 'pvt/retinanet_pvtv2-b0_fpn_1x_coco'])
def test_file_of_a_pvt_of_mmdet_takes_every_size(name, tmp_path):
    torch.manual_seed(0)
    model = finding(MODELS.build(zoo_cfg(name)).eval())
    export_onnx(model, tmp_path / 'model.onnx')
    checks = check_parity(
        model, load_runtime(tmp_path / 'model.onnx', threads=1), random_images([(96, 160), (131, 99)])
    )
    assert all(check.conclusive and check.num_values > 100 for check in checks)


def test_file_follows_the_settings_that_it_can(exported):
    detector, file = exported('RetinaNet')
    metadata, cfg = load_runtime(file).metadata, detector.bbox_head.test_cfg
    own = dict(test_cfg=cfg, data_preprocessor=dict(type='DetDataPreprocessor'))
    metadata |= dict(normalization=dict(channel_order='BGR'), padding=dict(size_divisor=1, value=0.0))
    assert metadata['family'] == 'retinanet' and follow_config('model.onnx', metadata, own) == (None, None, None)
    own['test_cfg'] = ConfigDict(cfg, score_thr=0.3, max_per_img=7)
    assert follow_config('model.onnx', metadata, own) == (0.3, 7, None)
    own['test_cfg'] = ConfigDict(cfg, nms_pre=60)
    with pytest.raises(ExportError, match=rf'test_cfg.nms_pre={cfg.nms_pre}, and this config 60'):
        follow_config('model.onnx', metadata, own)


@pytest.mark.parametrize('kind', KINDS)
def test_last_layers_stay_float32_in_int8(kind, exported):
    detector, file = exported(kind)
    names = [node.name for node in onnx.load(file).graph.node if node.op_type in ('Conv', 'ConvTranspose', 'Gemm')]
    names, hidden = [name for name in names if '_head' in name], ('convs.', 'fcs.', '_conv/', 'rpn_conv', 'upsample')
    for name in names:
        assert any(part in name for part in FLOAT_LAYERS) != any(part in name for part in hidden), name
    # RTMDet of mmdet has no objectness.
    missing = [layer for layer in find_family(detector).predictors if not any(layer in name for name in names)]
    assert missing == ['rtm_obj'] * ('RTMDet' in kind)


def test_logits_of_a_mean_of_probabilities_do_not_overflow():
    stages = [torch.tensor(row) for row in ([-300.0, 300, 20, 0.3, 90], [-200.0, 310, -20, -1, 1])]
    logits = Objects(*[None] * 4, stages).mean_mask_logits()
    probability = torch.stack(stages).double().sigmoid().mean(0)
    rest = (-torch.stack(stages).double()).sigmoid().mean(0)
    torch.testing.assert_close(logits.double(), probability.log() - rest.log(), rtol=1e-6, atol=1e-6)
    assert logits.isfinite().all() and logits[1] > 299


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
    model.bbox_head = AnchorHead(3, 16)
    refuses('a graph needs RetinaHead or ATSSHead or .* as bbox_head, not AnchorHead')
    model.__class__ = type('Other', (type(model),), dict(predict=lambda self: None))
    refuses('a detector that predicts as TwoStageDetector or SingleStageDetector does')
