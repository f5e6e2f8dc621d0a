"""Detectors under autocast, as tools/test.py --dtype runs them."""

import copy

import pytest
import torch
from mmdet.structures import DetDataSample

from slab_det.deployment.precision import autocast_forward

HEIGHT, WIDTH = 96, 1184


def predict(model, images):
    samples = [
        DetDataSample(
            metainfo=dict(
                img_shape=(HEIGHT, WIDTH),
                ori_shape=(HEIGHT, WIDTH),
                batch_input_shape=(HEIGHT, WIDTH),
                pad_shape=(HEIGHT, WIDTH),
                scale_factor=(1.0, 1.0),
            )
        )
        for _ in images
    ]
    with torch.no_grad():
        return model(images, samples, mode='predict')[0].pred_instances


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize('detector', ['faster_rcnn', 'mask_rcnn'])
def test_layers_compute_in_half_precision_and_boxes_in_float32(small_detector, detector, dtype):
    model = small_detector(detector)
    images = torch.randn(1, 3, HEIGHT, WIDTH)
    seen, priors = set(), []
    model.backbone.stages[0].blocks[0].attn.w_msa.qkv.register_forward_hook(lambda m, args, y: seen.add(y.dtype))
    model.neck.register_forward_hook(lambda m, args, y: seen.add(y[0].dtype))
    grid_priors = model.rpn_head.prior_generator.grid_priors

    def keep_priors(*args, **kwargs):
        priors.append(grid_priors(*args, **kwargs))
        return priors[-1]

    model.rpn_head.prior_generator.grid_priors = keep_priors
    predict(model, images)
    autocast_forward(model, dtype)
    assert seen == {torch.float32}
    seen.clear()
    found = predict(model, images)
    assert seen == {dtype}
    # In bfloat16 they would be multiples of 4 at the right end of this image.
    assert all(map(torch.equal, *priors))
    assert len(found) and found.bboxes.dtype == found.scores.dtype == torch.float32
    assert found.bboxes.isfinite().all() and found.scores.isfinite().all()
    found.bboxes.numpy()


def test_the_copy_of_an_autocast_model_computes_with_its_own_weights(small_detector):
    model = small_detector('faster_rcnn')
    autocast_forward(model, torch.bfloat16)
    twin = copy.deepcopy(model)
    called = []
    for name, detector in (('model', model), ('twin', twin)):
        qkv = detector.backbone.stages[0].blocks[0].attn.w_msa.qkv
        qkv.register_forward_hook(lambda module, args, y, name=name: called.append((name, y.dtype)))
    images = torch.randn(1, 3, HEIGHT, WIDTH)
    for detector in (model, twin):
        predict(detector, images)
    assert called == [('model', torch.bfloat16), ('twin', torch.bfloat16)]
