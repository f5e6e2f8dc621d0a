"""LayerNorm models become PRepBN models that compute the same, and whose RepBN branch is close to it."""
import numpy as np
import pytest
import timm
import torch
from conftest import randomize
from mmdet.registry import MODELS
from torch import nn

import slab_det
from slab_det.conversion import ConversionError, calibrate_norms
from slab_det.layers import PRepBN, TokenBN, set_gamma

SMALL = dict(embed_dims=8, depths=(2, 1, 1), num_heads=(1, 2, 2), strides=(4, 2, 2), out_indices=(0, 1, 2))


def images(count=2, size=(61, 90)):
    return torch.randn(count, 3, *size, dtype=torch.double)


def swin(norm='LN', kind='SwinTransformer', **kwargs):
    model = MODELS.build(dict(type=kind, **SMALL, norm_cfg=dict(type=norm), **kwargs)).double()
    randomize(model, 0)
    # mmdet's Swin returns None from eval().
    model.eval()
    return model


@pytest.mark.parametrize('name', ['SwinTransformer', 'SLABSwin', 'pvt_v2_b0', 'swin_tiny', 'detector'])
def test_converted_model_computes_the_same_at_gamma_1(name, small_detector):
    if name == 'detector':
        model = small_detector(norm_cfg=dict(type='LN')).double()
    elif name in ('SwinTransformer', 'SLABSwin'):
        model = swin(kind=name)
    else:
        kwargs = dict(embed_dim=8, depths=(1, 1, 2, 1), num_heads=(1, 1, 2, 2)) if name == 'swin_tiny' else {}
        model_name = 'swin_tiny_patch4_window7_224' if name == 'swin_tiny' else name
        model = timm.create_model(model_name, features_only=True, **kwargs).double().eval()
        randomize(model, 0)
    x = images(size=(224, 224))
    run = model.extract_feat if name == 'detector' else model
    num_norms = sum(isinstance(m, nn.LayerNorm) for m in model.modules())
    with torch.no_grad():
        expected = run(x)
        converted = slab_det.convert_norms(model)
        outputs = (converted.extract_feat if name == 'detector' else converted)(x)
    for output, reference in zip(outputs, expected, strict=True):
        assert torch.equal(output, reference)
    assert len(converted.conversion_report.converted) == num_norms > 0 and not converted.conversion_report.kept
    assert sum(isinstance(m, PRepBN) for m in converted.modules()) == num_norms
    assert not [m for m in model.modules() if isinstance(m, PRepBN)], 'the model given is left alone'


def test_eps_and_weights_are_kept_and_options_win():
    model = nn.Sequential(nn.LayerNorm(4, eps=1e-3), nn.LayerNorm(4, elementwise_affine=False))
    randomize(model, 1)
    model[0].weight.requires_grad_(False)
    converted = slab_det.convert_norms(model, dict(type='PRepBN', eps=1e-4))
    assert (converted[0].ln.eps, converted[0].repbn.eps) == (1e-3, 1e-4)
    assert torch.equal(converted[0].ln.weight, model[0].weight) and not converted[0].ln.weight.requires_grad
    assert converted[1].ln.eps == 1e-5 and torch.equal(converted[1].ln.weight, torch.ones(4))
    assert slab_det.convert_norms(model, inplace=True) is model


def test_skip_and_what_cannot_be_converted_are_reported():
    model = nn.ModuleDict(dict(a=nn.LayerNorm(4), b=nn.Sequential(nn.LayerNorm(4)), c=nn.LayerNorm((2, 4)),
                               d=timm.layers.LayerNorm2d(4), e=PRepBN(4)))
    report = slab_det.convert_norms(model, skip=['b']).conversion_report
    assert report.converted == ['a']
    assert {name: reason.split()[0] for name, reason in report.kept.items()} == {
        'b.0': 'skipped', 'c': 'it', 'd': 'LayerNorm2d'}
    assert '1 norms converted, 3 kept' in str(report)


def test_layernorm_weights_start_a_token_bn():
    converted = slab_det.convert_norms(swin(), dict(type='TokenBN'))
    assert sum(isinstance(m, TokenBN) for m in converted.modules()) == len(converted.conversion_report.converted)
    assert torch.equal(converted.norm0.weight, swin().norm0.weight)


def test_repbn_branch_is_the_least_squares_line_of_each_channel():
    norm = nn.Sequential(nn.LayerNorm(5)).double()
    randomize(norm, 3)
    # Tokens of very different length: LayerNorm is far from affine on them.
    batches = [torch.randn(2, n, 5).double() * torch.rand(2, n, 1) * 3 + torch.arange(5) for n in (40, 7, 100)]
    x = torch.cat([b.flatten(0, 1) for b in batches])
    y = norm(x).detach()
    converted = slab_det.convert_norms(norm, calibrate=batches)
    scale, shift = converted[0].repbn.inference_affine()
    for c in range(5):
        slope, intercept = np.polyfit(x[:, c].numpy(), y[:, c].numpy(), 1)
        assert (float(scale[c]), float(shift[c])) == pytest.approx((slope, intercept), rel=1e-8, abs=1e-8)
    residual = (scale * x + shift - y).square().sum() / (y - y.mean(0)).square().sum()
    assert converted.conversion_report.explained['0'] == pytest.approx(1 - float(residual), abs=1e-9)
    repbn = converted[0].repbn
    torch.testing.assert_close(repbn.running_mean, x.mean(0))
    torch.testing.assert_close(repbn.running_var, x.var(0, unbiased=False))
    for other in (repbn.eta + 1e-3, repbn.eta - 1e-3):
        alpha = (scale - other) * (repbn.running_var + repbn.eps).sqrt()
        assert alpha.square().sum() > repbn.weight.square().sum(), 'eta leaves the smallest alpha'


def test_calibrated_mixture_moves_less_than_the_default_start():
    model, x = swin(), images(4)
    batches = [images(4) for _ in range(3)]
    with torch.no_grad():
        expected = model(x)
        distances = []
        for calibrate in (None, batches):
            converted = slab_det.convert_norms(model, calibrate=calibrate)
            set_gamma(converted, 0.8)
            distances.append([float((a - b).norm() / b.norm()) for a, b in zip(converted(x), expected, strict=True)])
    assert all(near < 0.5 * far for far, near in zip(*distances, strict=True)), distances


def test_wrong_uses_are_named():
    model = slab_det.convert_norms(swin())
    with pytest.raises(ConversionError, match='no LayerNorm'):
        slab_det.convert_norms(nn.Linear(2, 2))
    with pytest.raises(ConversionError, match='whole model'):
        slab_det.convert_norms(nn.LayerNorm(2))
    with pytest.raises(ConversionError, match='only PRepBN'):
        slab_det.convert_norms(swin(), dict(type='TokenBN'), calibrate=[images()])
    with pytest.raises(ConversionError, match='no offline norm'):
        slab_det.convert_norms(swin(), dict(type='GN', num_groups=2))
    with pytest.raises(ConversionError, match='no batch'):
        calibrate_norms(model, [])
    with pytest.raises(ConversionError, match='not finite'):
        calibrate_norms(model, [images() * float('nan')])
    set_gamma(model, 0.5)
    with pytest.raises(ConversionError, match='gamma = 0.5.*gamma = 1'):
        calibrate_norms(model, [images()])
    with pytest.raises(ConversionError, match='no PRepBN'):
        calibrate_norms(swin(), [images()])
