"""Norms in modules that were cast to half precision as a whole, parameters and all."""

import copy

import pytest
import torch
from torch import nn

import slab_det
from slab_det.norms import MABN, UN, ChannelAffine, PowerNorm, PRepBN, RepBN, TokenBN

C = 5
HALF = [torch.bfloat16, torch.float16]
QUADRATIC = [UN, MABN, PowerNorm]
# With gamma, which only PRepBN has.
NORMS = [*((kind, 0.0) for kind in (TokenBN, RepBN, *QUADRATIC)), *((PRepBN, gamma) for gamma in (0.0, 0.5, 1.0))]


def make_norm(kind, gamma, dtype):
    """The norm and its parameters in float64, by name; they are exact in every dtype."""
    norm = kind(C)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randint(1, 9, parameter.shape, generator=generator) / 4)
    slab_det.set_gamma(norm, gamma)
    norm.to(dtype)
    return norm, {name: value.detach().double().requires_grad_() for name, value in norm.named_parameters()}


def tokens(dtype):
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(3, 40, C, generator=generator) + 1).to(dtype)


def formula(norm, gamma, p, x):
    """What a first training iteration computes, autograd included but for norms without mean."""
    if type(norm) in QUADRATIC:
        return p['weight'] * x / (x.square().mean((0, 1)) + 1e-5).sqrt() + p['bias']
    prefix = 'repbn.' if isinstance(norm, PRepBN) else ''
    y = (x - x.mean((0, 1))) / (x.var((0, 1), correction=0) + 1e-5).sqrt() * p[prefix + 'weight'] + p[prefix + 'bias']
    if f'{prefix}eta' in p:
        y = y + p[f'{prefix}eta'] * x
    if gamma > 0:
        ln = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        y = gamma * (ln * p['ln.weight'] + p['ln.bias']) + (1 - gamma) * y
    return y


def error(got, wanted):
    return ((got.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize('dtype', HALF, ids=str)
@pytest.mark.parametrize('kind, gamma', NORMS)
def test_a_half_module_trains_in_its_own_dtype(kind, gamma, dtype):
    norm, parameters = make_norm(kind, gamma, dtype)
    x = tokens(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, expected = norm(x), formula(norm, gamma, parameters, exact)
    assert y.dtype == dtype
    assert error(y, expected) < 0.01
    weight = torch.randn(x.shape).to(dtype)
    y.backward(weight)
    expected.backward(weight.double())
    assert x.grad.dtype == dtype
    if kind not in QUADRATIC:
        # The others replace the derivative of their mean by an average.
        assert error(x.grad, exact.grad) < 0.02
    for name, parameter in norm.named_parameters():
        if gamma == 0 and name.startswith('ln.'):
            continue
        if gamma == 1 and name.startswith('repbn.'):
            assert not parameter.grad.any(), name
            continue
        assert parameter.grad.dtype == dtype
        assert error(parameter.grad, parameters[name].grad) < 0.02, name


@pytest.mark.parametrize('dtype', HALF, ids=str)
@pytest.mark.parametrize('kind, gamma', NORMS)
def test_a_half_module_averages_its_statistics(kind, gamma, dtype):
    norm, _ = make_norm(kind, gamma, dtype)
    x = tokens(dtype)
    exact = x.double().flatten(0, 1)
    norm(x)
    mean, var = norm.statistics()
    assert mean.dtype == var.dtype == torch.float32
    if kind in QUADRATIC:
        assert error(var, 0.9 + 0.1 * exact.square().mean(0)) < 1e-5
    else:
        assert error(mean, 0.1 * exact.mean(0)) < 1e-5 and error(var, 0.9 + 0.1 * exact.var(0)) < 1e-5


@pytest.mark.parametrize('dtype', HALF, ids=str)
@pytest.mark.parametrize('kind, gamma', NORMS)
def test_a_half_module_calibrates_and_infers(kind, gamma, dtype):
    norm, parameters = make_norm(kind, gamma, dtype)
    x = tokens(dtype)
    before = [value.clone() for value in norm.statistics()]
    norm.eval().calibrating = True
    y = norm(x)
    assert y.dtype == dtype and error(y, formula(norm, gamma, parameters, x.double())) < 0.01
    assert all(map(torch.equal, norm.statistics(), before))
    norm.calibrating = False
    y = norm(x)
    assert y.dtype == dtype
    if gamma == 0:
        scale, shift = norm.inference_affine()
        assert error(y, scale * x.double() + shift) < 0.01


@pytest.mark.parametrize('kind, gamma', [(RepBN, 0.0), (PRepBN, 0.0), (PRepBN, 0.5)])
def test_float32_modules_keep_float32_under_autocast(kind, gamma):
    """As LayerNorm does: the residual stream begins with such an output."""
    norm, _ = make_norm(kind, gamma, torch.float32)
    with torch.autocast('cpu', torch.bfloat16):
        assert norm(tokens(torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize('dtype', HALF, ids=str)
@pytest.mark.parametrize('kind', [TokenBN, RepBN, PRepBN, *QUADRATIC])
def test_a_half_model_recalibrates_to_the_moments_of_its_input(kind, dtype):
    norm, _ = make_norm(kind, 0.0, dtype)
    x = tokens(dtype)
    slab_det.recalibrate(nn.Sequential(norm), [x], progress=False)
    exact = x.double().flatten(0, 1)
    mean, var = norm.statistics()
    if kind in QUADRATIC:
        assert error(var, exact.square().mean(0)) < 1e-5
    else:
        assert error(mean, exact.mean(0)) < 1e-5 and error(var, exact.var(0, correction=0)) < 1e-5


@pytest.mark.parametrize('cast', [nn.Module.half, nn.Module.bfloat16, lambda m: m.double().to(torch.float16)])
@pytest.mark.parametrize('kind', [TokenBN, RepBN, PRepBN, *QUADRATIC])
def test_norms_keep_their_statistics_when_cast(kind, cast):
    model = nn.Sequential(kind(C))
    norm = model[0]
    generator = torch.Generator().manual_seed(3)
    for name, buffer in norm.named_buffers():
        if buffer.is_floating_point() and name != '_gamma':
            # Beyond float16.
            buffer.copy_(1e5 * (1 + torch.rand(buffer.shape, generator=generator)))
    before = copy.deepcopy(dict(norm.named_buffers()))
    cast(model)
    assert {parameter.dtype for parameter in norm.parameters()} < set(HALF)
    for name, value in norm.named_buffers():
        assert torch.equal(value, before[name]) and value.dtype == before[name].dtype, name
    other = kind(C).to(next(norm.parameters()).dtype)
    other.load_state_dict(norm.state_dict())
    for name, value in norm.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
        assert other.state_dict()[name].dtype == value.dtype, name
    assert {value.dtype for value in model.double()[0].statistics()} == {torch.float64}


@pytest.mark.parametrize('kind', [TokenBN, RepBN, PRepBN])
def test_a_float16_module_knows_variances_beyond_float16(kind):
    """Those of tokens of 1000, which float16 holds well."""
    norm, _ = make_norm(kind, 0.0, torch.float16)
    inner = norm.repbn if kind is PRepBN else norm
    inner.momentum = 1.0
    x = (1000 * torch.randn(2, 200, C, generator=torch.Generator().manual_seed(4))).half()
    norm(x)
    mean, var = (value.double() for value in norm.statistics())
    assert var.min() > 7e5 and error(var, x.double().var((0, 1))) < 1e-5
    y = norm.eval()(x)
    scale, shift = norm.inference_affine()
    wanted = (x.double() - mean) / (var + 1e-5).sqrt() * inner.weight.double() + inner.bias.double()
    if kind is not TokenBN:
        wanted = wanted + inner.eta.double() * x.double()
    assert y.dtype == torch.float16
    assert error(y, wanted) < 1e-3 and error(scale * x.double() + shift, wanted) < 1e-6


@pytest.mark.parametrize('kind', [TokenBN, RepBN, PRepBN, *QUADRATIC])
def test_buffers_that_a_checkpoint_replaces_are_float32_at_least(kind):
    source = nn.Sequential(kind(C))
    model = nn.Sequential(kind(C))
    model.load_state_dict(
        {name: value.half() if value.is_floating_point() else value for name, value in source.state_dict().items()},
        assign=True,
    )
    for (name, buffer), wanted in zip(model.named_buffers(), source.buffers(), strict=True):
        assert buffer.dtype == wanted.dtype, name


@pytest.mark.parametrize('kind', [TokenBN, RepBN, PRepBN, *QUADRATIC])
def test_norms_built_in_half_precision_have_statistics_in_float32(kind):
    torch.set_default_dtype(torch.bfloat16)
    try:
        norm = kind(C)
    finally:
        torch.set_default_dtype(torch.float32)
    x = tokens(torch.bfloat16).requires_grad_()
    norm(x).sum().backward()
    assert {value.dtype for value in norm.statistics()} == {torch.float32} and x.grad.dtype == torch.bfloat16
    assert norm.eval()(x).dtype == torch.bfloat16


@pytest.mark.parametrize('kind', QUADRATIC)
def test_large_values_in_a_float16_module_stay_finite(kind):
    norm = kind(C).half()
    x = torch.full((2, 4, C), 300.0, dtype=torch.float16, requires_grad=True)
    for _ in range(12):
        y = norm(x)
        y.sum().backward()
    assert y.dtype == torch.float16 and y.isfinite().all() and x.grad.isfinite().all()
    assert all(value.isfinite().all() for value in norm.state_dict().values())
    assert norm.running_var.min() > 5e4
    y = norm.eval()(x)
    torch.testing.assert_close(y.double(), (x.double() / (norm.running_var.double() + 1e-5).sqrt()), rtol=2e-3, atol=0)


@pytest.mark.parametrize('kind', ['TokenBN', 'PRepBN', 'UN', 'MABN', 'PowerNorm'])
def test_fusing_a_half_model_leaves_one_dtype(small_detector, kind):
    backbone = small_detector(norm_cfg=dict(type=kind)).backbone.half()
    # A backbone alone keeps its output norms as one multiply-add each.
    fused = slab_det.fuse(backbone)
    assert any(isinstance(module, ChannelAffine) for module in fused.modules())
    assert {value.dtype for value in fused.state_dict().values() if value.is_floating_point()} == {torch.float16}
    exact = slab_det.fuse(backbone.double())
    for name, value in fused.named_parameters():
        wanted = exact.get_parameter(name)
        assert (value.double() - wanted).abs().max() <= 1e-3 * wanted.abs().max(), name
