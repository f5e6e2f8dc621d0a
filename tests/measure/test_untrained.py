"""Detectors with random weights, prepared for timing."""

import torch
from conftest import SMALL_SWIN
from mmdet.registry import MODELS

import slab_det
from slab_det.measure.untrained import OBJECTS, prepare_untrained

SIZE = (200, 300)


def objects_found(model: torch.nn.Module) -> torch.Tensor:
    found, predict = [], model.predict
    model.predict = lambda *args, **options: found.append(predict(*args, **options)) or found[-1]
    slab_det.measure_latency({'a': model}, size=SIZE, rounds=1, warmup=0)
    found = found[0][0].pred_instances
    assert found.masks.shape == (len(found), *SIZE)
    return found.bboxes


def test_heads_find_the_same_boxes_with_every_backbone(small_detector_cfg) -> None:
    variants = ({'norm_cfg': {'type': 'LN'}}, {'norm_cfg': {'type': 'PRepBN'}}, {'attention': 'sla'})
    boxes = []
    for backbone in variants:
        torch.manual_seed(len(boxes))
        model = MODELS.build(small_detector_cfg(**backbone)).eval()
        model.rpn_head.test_cfg.update(nms_pre=300, max_per_img=300)
        model.roi_head.test_cfg.max_per_img = (100, -1, 1000)[len(boxes)]
        assert prepare_untrained(model)
        boxes.append(objects_found(slab_det.fuse(model)))
    assert [len(found) for found in boxes] == [OBJECTS] * len(variants)
    for other in boxes[1:]:
        torch.testing.assert_close(other, boxes[0])


def test_activations_stay_bounded_through_untrained_norms(small_detector_cfg) -> None:
    image = torch.randn(1, 3, 96, 128)
    largest = []
    for prepare in (lambda model: slab_det.set_gamma(model, 0.0), prepare_untrained):
        torch.manual_seed(0)
        model = MODELS.build(small_detector_cfg(**SMALL_SWIN | {'depths': (2, 2, 8, 2)})).eval()
        prepare(model)
        with torch.no_grad():
            largest.append(max(features.abs().max().item() for features in model.backbone(image)))
    assert largest[1] < 30 and largest[1] < largest[0] / 3, largest
