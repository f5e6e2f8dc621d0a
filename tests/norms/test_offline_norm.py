"""What all norms share."""

import copy

import pytest
import torch
from conftest import differing
from mmcv.cnn import build_norm_layer
from mmengine.registry import MODELS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import slab_det
from slab_det.norms import MABN, UN, PowerNorm, PRepBN, RepBN, TokenBN

C = 5
QUADRATIC = [UN, MABN, PowerNorm]
NORMS = [TokenBN, RepBN, PRepBN, *QUADRATIC]


def make_norm(kind):
    """In float64, with parameters and statistics that are all different, at gamma = 0."""
    norm = kind(C).double()
    with torch.no_grad():
        for name, tensor in norm.state_dict().items():
            if name.rpartition('.')[2] in ('weight', 'bias', 'eta', 'running_mean', 'running_var'):
                tensor.copy_(torch.rand_like(tensor) + 0.5)
    slab_det.set_gamma(norm, 0.0)
    return norm


def tokens(*shape, **kwargs):
    return (3 * torch.randn(*(shape or (2, 7)), C, dtype=torch.double) + 1).requires_grad_(**kwargs)


def formula(norm, x, mean, var):
    p = {name.removeprefix('repbn.'): value for name, value in norm.named_parameters()}
    if type(norm) in QUADRATIC:
        mean, var = 0, var + mean.square()
    return p['weight'] * (x - mean) / (var + norm.eps).sqrt() + p['bias'] + p.get('eta', 0) * x


@pytest.mark.parametrize('kind', NORMS)
def test_evaluation_is_the_affine_of_the_statistics_and_trains(kind):
    norm = make_norm(kind).eval()
    mean, var = torch.rand(C).double(), torch.rand(C).double() + 1
    norm.set_statistics(mean, var)
    before = copy.deepcopy(norm)
    x = tokens()
    y, expected = norm(x), formula(norm, x, mean, var)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    scale, shift = norm.inference_affine()
    torch.testing.assert_close(scale * x + shift, expected, rtol=1e-12, atol=1e-12)
    trained = [x, *(p for name, p in norm.named_parameters() if not name.startswith('ln.'))]
    for got, wanted in zip(*(torch.autograd.grad(z.sin().sum(), trained) for z in (y, expected)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    assert not differing(norm, before)


@pytest.mark.parametrize('kind', NORMS)
def test_folds_take_the_affine_in_float64(kind):
    norm = make_norm(kind).float()
    exact = copy.deepcopy(norm).double().inference_affine()
    for got, wanted in zip(norm.float64_affine(), exact, strict=True):
        assert got.dtype == torch.float64 and not got.requires_grad and torch.equal(got, wanted)
    assert {value.dtype for value in norm.inference_affine()} == {torch.float32}


@pytest.mark.parametrize('kind', NORMS)
def test_calibrating_normalises_by_batch_and_keeps_all_state(kind):
    norm = make_norm(kind)
    before = copy.deepcopy(norm)
    norm.calibrating = True
    for training in (True, False):
        x = tokens(requires_grad=True)
        y = norm.train(training)(x)
        torch.testing.assert_close(y, formula(norm, x, x.mean((0, 1)), x.var((0, 1), correction=0)))
        y.sum().backward()
        assert not differing(norm, before)
    norm.calibrating = False
    norm.train()(x)
    assert differing(norm, before)


@pytest.mark.parametrize('kind', NORMS)
def test_training_never_waits_for_the_device(kind):
    """Fake tensors have no values: reading one, as .item() and a branch do, is an error."""
    with FakeTensorMode():
        norm = kind(C)
        for _ in range(3):
            x = torch.randn(2, 3, C, requires_grad=True)
            (checkpoint(norm, x, use_reentrant=False) + norm(x)).sum().backward()


@pytest.mark.parametrize('kind', NORMS)
def test_arguments_and_channels(kind):
    for scope in ({}, dict(_scope_='mmdet'), dict(_scope_='mmengine')):
        assert type(MODELS.build(dict(type=kind.__name__, num_features=C, **scope))) is kind
    norm = build_norm_layer(dict(type=kind.__name__, momentum=0.2), C)[1]
    assert type(norm) is kind and norm.num_features == C and norm.eps == 1e-5
    with pytest.raises(ValueError, match=rf'{C}.*channels last'):
        norm(torch.zeros(2, C + 1, 3))
