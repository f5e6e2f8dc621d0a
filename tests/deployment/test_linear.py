import pytest
import torch
from torch import nn

from slab_det.deployment.linear import DeployedLinear, linear, linear_add, takes_onednn

ERF = {'none': lambda x: x, 'relu': lambda x: x.clamp(min=0), 'gelu': lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2}


@pytest.mark.parametrize('dtype, bound', [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize('activation', ERF)
@pytest.mark.parametrize('bias', [True, False])
@torch.no_grad()
def test_linear_with_activation_and_residual(dtype, bound, activation, bias):
    x, weight, residual = (torch.randn(*shape).to(dtype) for shape in ((2, 7, 12), (20, 12), (2, 7, 20)))
    b = torch.randn(20).to(dtype) if bias else None
    product = torch.einsum('blc,oc->blo', x.double(), weight.double()) + (b.double() if bias else 0)
    for out, expected in (
        (linear(x, weight, b, activation), ERF[activation](product)),
        (linear_add(x, weight, b, residual), product + residual.double()),
    ):
        assert out.dtype == dtype
        difference = (out.double() - expected).abs().max() / expected.abs().max()
        assert difference <= bound, (dtype, activation, bias, difference)


@torch.no_grad()
def test_slices_of_a_batch_are_taken():
    x = torch.randn(2, 9, 12)[:, 3:7]
    weight, residual = torch.randn(5, 12), torch.randn(2, 9, 5)[:, 3:7]
    expected = torch.einsum('blc,oc->blo', x, weight) + residual
    assert torch.allclose(linear_add(x, weight, None, residual), expected, atol=1e-5)


def test_gradients_and_autocast_take_the_public_operators():
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    with torch.no_grad():
        fast = takes_onednn(x, weight)
    assert takes_onednn(x, weight) == fast
    assert not takes_onednn(x.requires_grad_(), weight)
    linear(x, weight, None, 'gelu').sum().backward()
    assert x.grad is not None
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        assert linear(x, weight, None).dtype == torch.bfloat16


def test_deployed_linear_shares_parameters():
    layer = nn.Linear(3, 4)
    deployed = DeployedLinear(layer)
    assert deployed.weight is layer.weight and deployed.bias is layer.bias
    assert deployed.state_dict().keys() == layer.state_dict().keys()
