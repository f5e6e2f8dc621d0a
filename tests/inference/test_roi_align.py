import pytest
import torch
import torchvision
from mmcv.ops import RoIAlign
from torch import nn

from slab_det.inference.cpu.roi_align import DeployedRoIAlign, deployed_roi_align


@pytest.fixture
def rois():
    """RoIs of two images: inside, across every border, far outside, a line, a point."""
    boxes = torch.rand(60, 4, dtype=torch.float64) * 300 - 50
    boxes[:, 2:] = boxes[:, :2] + torch.rand(60, 2) ** 2 * 200
    boxes[40, 2:] = boxes[40, :2]
    boxes[41, 3] = boxes[41, 1]
    boxes[42] = torch.tensor([10, 20, 12, 260])
    boxes[43:45] += 1000
    return torch.cat([torch.arange(60)[:, None] % 2, boxes], 1)


@torch.no_grad()
def test_values_equal_torchvision(rois):
    x = torch.randn(2, 5, 40, 61, dtype=torch.float64).to(memory_format=torch.channels_last)
    for part in (rois, rois[:1], rois[43:45], rois[:0]):
        out = deployed_roi_align(RoIAlign((7, 5), 0.25))(x, part)
        expected = torchvision.ops.roi_align(x, part, (7, 5), 0.25, 0, True)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
def test_maps_in_half_precision_are_pooled_in_float32(rois, dtype):
    x, layer = torch.randn(2, 5, 400, 400).to(dtype), deployed_roi_align(RoIAlign(7, 1.0))
    rois = rois[:40].float() + 70
    rois[:, 0] = torch.arange(40) % 2
    found = layer(x, rois)
    expected = torchvision.ops.roi_align(x.float(), rois, 7, 1.0, 0, True)
    # Coordinates in the dtype of the maps would be wrong by a pixel, and the maps are noise.
    torch.testing.assert_close(found, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-3)


@torch.no_grad()
def test_nan_in_rois_or_maps_gives_nan(rois):
    layer = deployed_roi_align(RoIAlign(7, 0.25))
    rois[3, 1:] = torch.nan
    assert layer(torch.randn(2, 4, 40, 40, dtype=torch.float64), rois)[3].isnan().all()
    assert layer(torch.full((2, 4, 40, 40), torch.nan), rois[:1].float()).isnan().all()


def test_only_aligned_average_pooling_without_sampling_ratio_is_replaced():
    assert type(deployed_roi_align(RoIAlign(7, 0.25))) is DeployedRoIAlign
    for options in (dict(pool_mode='max'), dict(sampling_ratio=2), dict(aligned=False)):
        assert deployed_roi_align(RoIAlign(7, 0.25, **options)) is None, options
    assert deployed_roi_align(nn.Identity()) is None
