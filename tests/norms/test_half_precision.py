"""Norms in half precision: modules cast as a whole, and autocast."""

import copy

import pytest
import torch
from norm_formulas import NORMS, QUADRATIC, C, copy_parameters, formula
from torch import nn

import slab_det
from slab_det.norms import ChannelAffine, PRepBN, RepBN

HALF = [torch.bfloat16, torch.float16]


def make_norm(kind, gamma, dtype):
    """A norm whose parameters are exact in every dtype."""
    norm = kind(C)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randint(1, 9, parameter.shape, generator=generator) / 4)
    slab_det.set_gamma(norm, gamma)
    return norm.to(dtype)


def tokens(dtype):
    generator = torch.Generator().manual_seed(2)
    # Their variance, 90000, is beyond float16.
    return (300 * (torch.randn(3, 40, C, generator=generator) + 1)).to(dtype)


def error(got, wanted):
    return ((got.double() - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize('dtype', HALF, ids=str)
@pytest.mark.parametrize('kind, gamma', [*((kind, 0.0) for kind in NORMS), (PRepBN, 0.5), (PRepBN, 1.0)])
def test_a_half_module_trains_in_its_own_dtype_and_averages_in_float32(kind, gamma, dtype):
    norm = make_norm(kind, gamma, dtype)
    parameters, x = copy_parameters(norm), tokens(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    # For quadratic norms the formula holds in the first iteration only.
    y, expected = norm(x), formula(norm, parameters, exact, exact.mean((0, 1)), exact.var((0, 1), correction=0))
    assert y.dtype == dtype and error(y, expected) < 0.01
    mean, var = norm.statistics()
    assert mean.dtype == var.dtype == torch.float32
    flat = exact.detach().flatten(0, 1)
    if kind in QUADRATIC:
        assert error(var, 0.9 + 0.1 * flat.square().mean(0)) < 1e-5
    else:
        assert error(mean, 0.1 * flat.mean(0)) < 1e-5 and error(var, 0.9 + 0.1 * flat.var(0)) < 1e-5
    weight = torch.randn(x.shape).to(dtype)
    y.backward(weight)
    expected.backward(weight.double())
    assert x.grad.dtype == dtype
    if kind not in QUADRATIC:
        # Quadratic norms replace the derivative of mean x^2 by a moving average.
        assert error(x.grad, exact.grad) < 0.02
    for name, parameter in norm.named_parameters():
        if gamma == 0 and name.startswith('ln.'):
            continue
        if gamma == 1 and name.startswith('repbn.'):
            assert not parameter.grad.any(), name
            continue
        assert parameter.grad.dtype == dtype
        assert error(parameter.grad, parameters[name].grad) < 0.02, name


@pytest.mark.parametrize('kind, gamma', [(RepBN, 0.0), (PRepBN, 0.0), (PRepBN, 0.5)])
def test_float32_modules_keep_float32_under_autocast(kind, gamma):
    """As LayerNorm does: the residual stream starts with the output of a norm."""
    norm = make_norm(kind, gamma, torch.float32)
    with torch.autocast('cpu', torch.bfloat16):
        assert norm(tokens(torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize('cast', [nn.Module.half, nn.Module.bfloat16, lambda m: m.double().to(torch.float16)])
@pytest.mark.parametrize('kind', NORMS)
def test_norms_keep_their_statistics_when_cast(kind, cast):
    model = nn.Sequential(kind(C))
    norm = model[0]
    # Every dtype but float64 would round this Python float.
    slab_det.set_gamma(model, 0.3)
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
    if kind is PRepBN:
        assert norm.float()._gamma.item() == norm.gamma == 0.3


@pytest.mark.parametrize('kind', NORMS)
def test_half_precision_statistics_assigned_by_loading_become_float32(kind):
    dtypes = {name: value.dtype for name, value in kind(C).named_buffers()}
    half = {name: value.half() if value.is_floating_point() else value for name, value in kind(C).state_dict().items()}
    assigned = nn.Sequential(kind(C))
    assigned.load_state_dict({f'0.{name}': value for name, value in half.items()}, assign=True)
    assert {name: value.dtype for name, value in assigned[0].named_buffers()} == dtypes
    assert {value.dtype for value in assigned.parameters()} < set(HALF)


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
