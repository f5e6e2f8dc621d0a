"""TorchvisionOps, the replacement of mmcv's compiled operators."""

import importlib.util
import sys
from itertools import product

import mmcv.ops
import mmcv.utils
import pytest
import torch
import torchvision
from mmcv.ops import RoIAlign, batched_nms, nms

from slab_det.runtime.ops import TorchvisionOps, install_ops

pytestmark = pytest.mark.skipif(not isinstance(mmcv._ext, TorchvisionOps), reason='mmcv has compiled operators')


def random_boxes(count, dtype=torch.float32, integer=False):
    corners = torch.rand(count, 2, 2, dtype=torch.float64) * 60
    if integer:
        corners = corners.round()
    low, high = corners.min(1).values, corners.max(1).values
    return torch.cat([low, high], 1).to(dtype)


def greedy_nms(boxes, scores, threshold, offset=0):
    """Keeps boxes by descending score, unless the IoU with a kept box is above ``threshold``."""
    boxes, kept = boxes.double(), []
    for i in sorted(range(len(boxes)), key=lambda i: (-scores[i].item(), i)):
        x1, y1, x2, y2 = boxes[i].tolist()
        area = (x2 - x1 + offset) * (y2 - y1 + offset)
        for j in kept:
            u1, v1, u2, v2 = boxes[j].tolist()
            inter = max(0, min(x2, u2) - max(x1, u1) + offset) * max(0, min(y2, v2) - max(y1, v1) + offset)
            union = area + (u2 - u1 + offset) * (v2 - v1 + offset) - inter
            if union > 0 and inter / union > threshold:
                break
        else:
            kept.append(i)
    return kept


@pytest.mark.parametrize(('offset', 'threshold'), list(product((0, 1), (0.3, 0.5, 0.7))))
def test_nms_is_greedy_nms(offset, threshold):
    # Integer boxes, so that rounding moves no IoU across the threshold.
    boxes, scores = random_boxes(120, integer=True), torch.rand(120)
    before = boxes.clone()
    dets, kept = nms(boxes, scores, threshold, offset=offset)
    assert torch.equal(boxes, before)
    assert kept.tolist() == greedy_nms(boxes, scores, threshold, offset)
    assert torch.equal(dets, torch.cat([boxes[kept], scores[kept, None]], 1))


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    boxes, scores = random_boxes(50), torch.arange(50).to(dtype) / 64
    assert nms(boxes, scores, 0.5)[1].tolist() == greedy_nms(boxes, scores, 0.5)
    features, rois = torch.randn(1, 3, 8, 8).to(dtype).requires_grad_(), torch.tensor([[0.0, 1, 1, 6, 7]])
    out = RoIAlign(2, sampling_ratio=2)(features, rois.to(dtype))
    expected = torchvision.ops.roi_align(features.detach().float(), rois, 2, 1.0, 2, True)
    out.sum().backward()
    assert out.dtype == features.grad.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)


def rois_for(batch, count, dtype=torch.float64):
    """Returns RoIs inside the image, RoIs across its border, and one of zero area."""
    boxes = random_boxes(count) - 10
    boxes[0, 2:] = boxes[0, :2]
    return torch.cat([torch.arange(count)[:, None] % batch, boxes], 1).to(dtype)


@pytest.mark.parametrize(
    ('aligned', 'ratio', 'dtype'), list(product((True, False), (0, 2), (torch.float32, torch.float64)))
)
def test_roi_align_equals_torchvision(aligned, ratio, dtype):
    features = torch.randn(2, 3, 11, 13, dtype=dtype)
    rois = rois_for(2, 9, dtype)
    ours = features.clone().requires_grad_()
    reference = features.clone().requires_grad_()
    out = RoIAlign((5, 7), 0.25, ratio, aligned=aligned)(ours, rois)
    expected = torchvision.ops.roi_align(reference, rois, (5, 7), 0.25, ratio, aligned)
    assert out.dtype == dtype and torch.equal(out, expected)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    # Summation order of the scattered gradients may differ.
    torch.testing.assert_close(ours.grad, reference.grad)


def test_unavailable_operator_raises_its_name_when_called():
    with pytest.raises(RuntimeError, match='roi_align.*max'):
        RoIAlign(2, pool_mode='max')(torch.randn(1, 1, 4, 4), torch.tensor([[0.0, 0, 0, 3, 3]]))
    boxes, scores = random_boxes(3), torch.rand(3)
    with pytest.raises(RuntimeError, match='"softnms".*compile mmcv'):
        batched_nms(boxes, scores, torch.zeros(3), dict(type='soft_nms', iou_threshold=0.5))
    with pytest.raises(RuntimeError, match='"no_such_operator"'):
        TorchvisionOps().no_such_operator(1, keyword=2)


@pytest.fixture
def without_stand_in(tmp_path, monkeypatch):
    """Restores mmcv to its state before slab_det; returns a folder on ``mmcv.__path__``."""
    monkeypatch.setattr(mmcv, '_ext', None)
    monkeypatch.delitem(sys.modules, 'mmcv._ext')
    monkeypatch.setattr(mmcv, '__path__', [*mmcv.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    return tmp_path


def test_missing_extension_is_replaced(without_stand_in):
    install_ops()
    assert isinstance(importlib.import_module('mmcv._ext'), TorchvisionOps)


def test_extension_on_disk_is_left_alone(without_stand_in):
    (without_stand_in / '_ext.py').write_text('nms = print')
    install_ops()
    assert importlib.import_module('mmcv._ext').nms is print


def test_stand_in_passes_for_a_module():
    assert importlib.util.find_spec('mmcv._ext').name == 'mmcv._ext'
    assert importlib.import_module('mmcv._ext') is mmcv._ext
    assert not hasattr(mmcv._ext, '__path__')
    assert 'not compiled' in mmcv.utils.collect_env()['MMCV Compiler']
