"""Detectors in half precision: deployed, under autocast as tools/test.py --dtype runs them, and both."""

import random

import pytest
import torch
from graph_cases import build
from mmdet.structures import DetDataSample

import slab_det
from slab_det.families import deformable
from slab_det.families.half_precision import autocast_forward

HEIGHT, WIDTH = 64, 608


def predict(model, images, valid=None):
    shape = images.shape[2:]
    metainfo = dict(
        img_shape=(shape[0], valid or shape[1]),
        ori_shape=shape,
        batch_input_shape=shape,
        pad_shape=shape,
        scale_factor=(1.0, 1.0),
    )
    with torch.no_grad():
        return model(images, [DetDataSample(metainfo=metainfo)], mode='predict')[0].pred_instances


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('form', ['autocast', 'deployed', 'deployed in float32, autocast'])
def test_layers_compute_in_half_precision_and_boxes_in_float32(small_detector, form, dtype):
    model, images = slab_det.fuse(small_detector()), torch.randn(1, 3, HEIGHT, WIDTH)
    model.test_cfg.rcnn.score_thr = 0.0
    layers, regions, priors = set(), set(), []
    model.neck.register_forward_hook(lambda m, args, y: layers.add(y[0].dtype))
    model.roi_head.bbox_roi_extractor.register_forward_hook(lambda m, args, y: regions.add(args[1].dtype))
    grid_priors = model.rpn_head.prior_generator.grid_priors

    def keep_priors(*args, **kwargs):
        priors.append(grid_priors(*args, **kwargs))
        return priors[-1]

    model.rpn_head.prior_generator.grid_priors = keep_priors
    predict(model, images)
    if form == 'deployed':
        model = slab_det.deploy(model, dtype, inplace=True)
        assert {p.dtype for p in model.parameters()} == {dtype}
    elif form == 'autocast':
        autocast_forward(model, dtype)
    else:
        model = slab_det.deploy(model, inplace=True)
        model.forward = torch.autocast('cpu', dtype)(model.forward)
    assert torch.float32 in layers
    # deploy has run both models on its own image, the original in float64 too.
    del priors[1:]
    layers.clear(), regions.clear()
    found = predict(model, images)
    assert layers == {dtype} and regions == {torch.float32}
    # Priors in bfloat16 would be multiples of 4 at the right end of this image.
    assert all(map(torch.equal, *priors))
    assert len(found) and found.bboxes.dtype == found.scores.dtype == torch.float32
    assert (found.bboxes != found.bboxes.bfloat16().float()).float().mean() > 0.2
    assert found.bboxes.isfinite().all()


def test_a_detector_with_parameters_elsewhere_keeps_its_heads_in_float32(small_detector):
    model, images = slab_det.fuse(small_detector()), torch.randn(1, 3, HEIGHT, WIDTH)
    model.keypoint_head = torch.nn.Linear(2, 2).eval()
    deployed = slab_det.deploy(model, torch.bfloat16)
    parts = {name.partition('.')[0]: parameter.dtype for name, parameter in deployed.named_parameters()}
    halves = {name for name, dtype in parts.items() if dtype == torch.bfloat16}
    assert halves == {'backbone', 'neck'} < {*parts}
    assert {x.dtype for x in deployed.extract_feat(images)} == {torch.float32}
    assert len(predict(deployed, images)) > 5


@pytest.mark.parametrize(('kind', 'part'), [('Deformable DETR', 'encoder'), ('Mask2Former', 'pixel_decoder.encoder')])
@torch.no_grad()
def test_an_encoder_computes_in_half_precision_and_finds_its_samples_in_float32(kind, part, monkeypatch):
    model, images, seen = build(kind, random.Random(0)), torch.randn(1, 3, HEIGHT, WIDTH), []
    sample = deformable.sample_maps

    def record(values, sizes, references, *others):
        seen.append((values.dtype, references))
        return sample(values, sizes, references, *others)

    monkeypatch.setattr(deformable, 'sample_maps', record)
    references = {}
    for dtype in (torch.float32, torch.bfloat16):
        deployed = slab_det.deploy(model, dtype)
        halves = {name for name, parameter in deployed.named_parameters() if parameter.dtype == torch.bfloat16}
        assert any(f'{part}.layers' in name for name in halves) == (dtype == torch.bfloat16)
        assert not any(name.startswith(('decoder', 'bbox_head', 'panoptic_head.cls_embed')) for name in halves)
        seen.clear()
        # The right quarter is padding.
        found = predict(deployed, images, valid=WIDTH - 150)
        assert len(found) > 5 and found.bboxes.isfinite().all() and found.bboxes.dtype == torch.float32
        assert seen[0][0] == dtype
        references[dtype] = seen[0][1]
    assert references[torch.bfloat16].dtype == torch.float32 and torch.equal(*references.values())
    # In bfloat16 they would be rounded.
    assert (references[torch.float32] != references[torch.float32].bfloat16().float()).float().mean() > 0.2


def test_default_dtype_changes_nothing_in_a_deployed_detector(small_detector):
    model, images = slab_det.fuse(small_detector()), torch.randn(1, 3, HEIGHT, WIDTH)
    expected = predict(slab_det.deploy(model), images)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = predict(slab_det.deploy(model), images)
    finally:
        torch.set_default_dtype(before)
    assert len(found) == len(expected) > 5 and found.bboxes.dtype == torch.float32
    assert all(torch.equal(found[name], expected[name]) for name in expected.keys())
