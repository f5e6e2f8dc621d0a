"""Heads of two-stage detectors on fixed shapes."""

import torch
from conftest import as_trained
from mmdet.registry import MODELS

from slab_det.families.two_stage import BoxHead
from slab_det.fusion.channels import find_channels, resize_channels


@torch.no_grad()
def test_merged_box_heads_read_maps_that_lost_channels(small_detector_cfg):
    model = as_trained(MODELS.build(small_detector_cfg('faster_rcnn')))
    left = find_channels(model)['neck'].count // 2
    resize_channels(model, {'neck': left})
    head, regions = model.roi_head.bbox_head.eval(), torch.randn(3, left, 7, 7)
    merged = BoxHead(head, merged=True)
    assert merged.merged
    for one, other in zip(merged(regions), BoxHead(head, merged=False)(regions), strict=True):
        torch.testing.assert_close(one, other)
