"""Half-precision kernels that are wrong on some CPU, as oneDNN's for patch convolutions are on CPUs with AMX."""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
from conftest import SMALL_PVT, as_trained
from mmdet.registry import MODELS
from mmengine.logging import MMLogger
from torch import nn

import slab_det
from slab_det.common.errors import DeploymentError
from slab_det.compare import kernels
from slab_det.compare.difference import rms_difference
from slab_det.compare.kernels import find_wrong_layers

conv2d, conv_transpose2d = F.conv2d, F.conv_transpose2d


def broken(function, is_affected):
    """The function with mixed-up channels in bfloat16, for some strides."""

    def wrong(x, weight, bias=None, stride=1, *args, **kwargs):
        out = function(x, weight, bias, stride, *args, **kwargs)
        return out.roll(1, 1) if x.dtype == torch.bfloat16 and is_affected(weight, stride) else out

    return wrong


@pytest.fixture
def wrong_patch_convs(monkeypatch):
    """A CPU like those with AMX, where bfloat16 convolutions are wrong if their kernel is their stride."""
    monkeypatch.setattr(
        F, 'conv2d', broken(conv2d, lambda weight, stride: tuple(weight.shape[2:]) == tuple(stride) != (1, 1))
    )
    monkeypatch.setattr(kernels, '_warn', kernels._warn.__wrapped__)
    kernels._is_patch_conv_wrong.cache_clear()
    yield
    kernels._is_patch_conv_wrong.cache_clear()


@pytest.fixture
def pvt():
    model = MODELS.build(dict(SMALL_PVT, type='PyramidVisionTransformer'))
    return as_trained(model)


@torch.no_grad()
def test_deployed_models_do_not_use_wrong_kernels(wrong_patch_convs, pvt, caplog):
    MMLogger.get_current_instance().addHandler(caplog.handler)
    images = torch.randn(1, 3, 64, 96)
    for found, expected in zip(slab_det.deploy(pvt, torch.bfloat16)(images), pvt(images), strict=True):
        assert rms_difference(found, expected) < 0.03
    message = r'wrong values on this CPU for \d convolutions of Pyramid\w+ in torch.bfloat16 \(layers.*\.sr,'
    assert caplog.text.count('ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16') == 1
    assert re.search(message, caplog.text), caplog.text


def test_a_form_with_wrong_kernels_is_refused_and_the_layers_are_named(wrong_patch_convs, pvt, monkeypatch):
    monkeypatch.setattr('slab_det.inference.deployment.patch_conv', lambda layer: None)
    with pytest.raises(
        DeploymentError, match=r'wrong values in torch.bfloat16 on this CPU for .*layers.0.0.projection'
    ):
        slab_det.deploy(pvt, torch.bfloat16)


def test_a_wrong_kernel_in_a_head_is_refused_and_named(small_detector, monkeypatch):
    monkeypatch.setattr(F, 'conv_transpose2d', broken(conv_transpose2d, lambda *_: True))
    with pytest.raises(DeploymentError, match='wrong values .* for roi_head.mask_head.upsample; deploy it in float32'):
        slab_det.deploy(slab_det.fuse(small_detector()), torch.bfloat16)


@torch.no_grad()
def test_only_wrong_half_precision_layers_are_found(monkeypatch):
    model = nn.Sequential(nn.Conv2d(3, 8, 2, 2), nn.Conv2d(8, 8, 1), nn.ConvTranspose2d(8, 4, 2, 2))
    monkeypatch.setattr(F, 'conv2d', broken(conv2d, lambda weight, _: weight.shape[2] == 2))
    calls = []
    for layer in model:
        # A reference that ran as a module would call the user's hooks too.
        layer.register_forward_hook(lambda *_: calls.append(1))
    for dtype, expected in ((torch.bfloat16, ['0']), (torch.float16, []), (torch.float32, [])):
        with find_wrong_layers(model.to(dtype)) as wrong:
            model(torch.randn(1, 3, 8, 8, dtype=dtype))
        assert [*wrong] == expected, dtype
    assert len(calls) == 9


def test_eager_half_precision_warns_once(wrong_patch_convs, pvt, caplog, monkeypatch):
    MMLogger.get_current_instance().addHandler(caplog.handler)
    monkeypatch.setattr(kernels, '_warn', functools.lru_cache(None)(kernels._warn))
    for _ in range(2):
        slab_det.measure_latency({'pvt': pvt}, (64, 64), rounds=1, warmup=0, scope='backbone', dtype='bfloat16')
    slab_det.measure_latency({'pvt': pvt}, (64, 64), rounds=1, warmup=0, scope='backbone')
    assert caplog.text.count('computes wrong values on this CPU') == 1
