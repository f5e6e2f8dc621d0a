import pytest
import torch
import torchvision
from conftest import SLA
from mmcv.ops import RoIAlign

import slab_det
from slab_det.deployment.cpu.roi_align import DeployedRoIAlign


@pytest.fixture
def rois():
    """Of two images: inside, across every border, far outside, a line, a point."""
    boxes = torch.rand(60, 4, dtype=torch.float64) * 300 - 50
    boxes[:, 2:] = boxes[:, :2] + torch.rand(60, 2) ** 2 * 200
    boxes[40, 2:] = boxes[40, :2]
    boxes[41, 3] = boxes[41, 1]
    boxes[42] = torch.tensor([10, 20, 12, 260])
    boxes[43:45] += 1000
    return torch.cat([torch.arange(60)[:, None] % 2, boxes], 1)


@pytest.mark.parametrize('aligned', [True, False])
@pytest.mark.parametrize('ratio', [0, 2])
@torch.no_grad()
def test_values_are_those_of_torchvision(rois, ratio, aligned):
    x = torch.randn(2, 5, 40, 61, dtype=torch.float64).to(memory_format=torch.channels_last)
    layer = RoIAlign((7, 5), 0.25, ratio, 'avg', aligned)
    for part in (rois, rois[:1], rois[43:45], rois[:0]):
        out = DeployedRoIAlign(layer)(x, part)
        expected = torchvision.ops.roi_align(x, part, (7, 5), 0.25, ratio, aligned)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@torch.no_grad()
def test_a_broken_model_does_not_look_healthy(rois):
    layer = DeployedRoIAlign(RoIAlign(7, 0.25))
    rois[3, 1:] = torch.nan
    assert layer(torch.randn(2, 4, 40, 40, dtype=torch.float64), rois)[3].isnan().all()
    assert layer(torch.full((2, 4, 40, 40), torch.nan), rois[:1].float()).isnan().all()


def test_gradients_are_those_of_the_layer(rois):
    layer, grads = RoIAlign(7, 0.25), []
    for module in (layer, DeployedRoIAlign(layer)):
        x = torch.ones(2, 3, 20, 20, requires_grad=True)
        module(x, rois[:5].float()).square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)


def test_only_averages_are_replaced(small_detector):
    model = slab_det.fuse(small_detector(**SLA))
    model.roi_head.mask_roi_extractor.roi_layers[0].pool_mode = 'max'
    roi_head = slab_det.deploy(model).roi_head
    assert {*map(type, roi_head.bbox_roi_extractor.roi_layers)} == {DeployedRoIAlign}
    assert type(roi_head.mask_roi_extractor.roi_layers[0]) is RoIAlign
