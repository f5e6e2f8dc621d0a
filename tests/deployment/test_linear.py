import pytest
import torch
from conftest import relative_difference

from slab_det.deployment.cpu import linear as linear_module
from slab_det.deployment.cpu.linear import linear, linear_add, takes_onednn

ERF = {'none': lambda x: x, 'relu': lambda x: x.clamp(min=0), 'gelu': lambda x: x * (1 + torch.erf(x / 2**0.5)) / 2}


@pytest.fixture(params=[True, False], ids=['oneDNN', 'public operators'])
def onednn(request, monkeypatch):
    """Float32 products by oneDNN or not, whichever is faster on this machine."""
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip('PyTorch without oneDNN')
    monkeypatch.setattr(linear_module, 'ONEDNN_DTYPES', {torch.float32} if request.param else set())
    return request.param


@pytest.mark.parametrize('dtype, bound', [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize('activation', ERF)
@pytest.mark.parametrize('bias', [True, False])
@torch.no_grad()
def test_linear_with_activation_and_residual(onednn, dtype, bound, activation, bias):
    # Slices of a batch, as tiles are.
    x, residual = (torch.randn(2, 9, channels).to(dtype)[:, 1:8] for channels in (12, 20))
    weight, b = torch.randn(20, 12).to(dtype), torch.randn(20).to(dtype) if bias else None
    product = torch.einsum('blc,oc->blo', x.double(), weight.double()) + (b.double() if bias else 0)
    for out, expected in (
        (linear(x, weight, b, activation), ERF[activation](product)),
        (linear_add(x, weight, b, residual), product + residual.double()),
    ):
        assert out.dtype == dtype
        difference = relative_difference([out], [expected])
        assert difference <= bound, (dtype, activation, bias, difference)


def test_gradients_and_autocast_take_the_public_operators(onednn):
    x, weight = torch.randn(3, 4), torch.randn(5, 4)
    assert takes_onednn(x, weight) == onednn
    assert not takes_onednn(x.requires_grad_(), weight)
    linear(x, weight, None, 'gelu').sum().backward()
    assert x.grad is not None
    with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
        assert linear(x, weight, None).dtype == torch.bfloat16
