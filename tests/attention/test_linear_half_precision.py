"""Linear attention sums over thousands of tokens, which float16 cannot hold."""

import copy

import pytest
import torch

from slab_det.attention import (
    FocusedMapAttention,
    FocusedWindowAttention,
    ShiftedWindowAttention,
    SimplifiedMapAttention,
    SimplifiedWindowAttention,
)

WINDOW = 56
LINEAR = {
    'window sla': lambda: ShiftedWindowAttention(SimplifiedWindowAttention(16, 2, WINDOW), 0, 0.0),
    'window focused': lambda: ShiftedWindowAttention(FocusedWindowAttention(16, 2, WINDOW), 0, 0.0),
    'map sla': lambda: SimplifiedMapAttention(16, 2, table_shape=(WINDOW, WINDOW)),
    'map focused': lambda: FocusedMapAttention(16, 2, table_shape=(WINDOW, WINDOW)),
}


def pass_through(module):
    """q = k = v = x, and the output as it is: activations of the input's size everywhere."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(('qkv.weight', 'in_proj_weight')):
                parameter.copy_(torch.eye(16).repeat(3, 1))
            elif name.endswith(('.proj.weight', 'out_proj.weight')):
                parameter.copy_(torch.eye(16))
            elif name.endswith('bias'):
                parameter.zero_()
    return module


@pytest.mark.parametrize('kind', LINEAR)
def test_linear_attention_stays_finite_on_float16_activations_of_100(kind):
    x = 100 * torch.rand(1, WINDOW**2, 16)
    half = x.half()
    assert not (half.transpose(1, 2) @ half).isfinite().any(), 'what the sums over keys would be in float16'
    module = pass_through(LINEAR[kind]())
    exact = copy.deepcopy(module).double()(x.half().double(), (WINDOW, WINDOW))
    x.requires_grad_()
    with torch.autocast('cpu', torch.float16):
        y = module(x.half(), (WINDOW, WINDOW))
    # Inside, autocast would lower the products of the backward pass as well.
    y.float().square().mean().backward()
    assert y.isfinite().all() and (y.double() - exact).norm() < 0.01 * exact.norm()
    assert x.grad.isfinite().all()
    unused = [name for name, parameter in module.named_parameters() if parameter.grad is None]
    assert not unused
    assert all(parameter.grad.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize('kind', LINEAR)
def test_linear_attention_cast_to_float16_infers_activations_of_100(kind):
    x = (100 * torch.rand(1, WINDOW**2, 16)).half()
    module = pass_through(LINEAR[kind]()).half()
    exact = copy.deepcopy(module).double()(x.double(), (WINDOW, WINDOW))
    with torch.no_grad():
        y = module(x, (WINDOW, WINDOW))
    assert y.isfinite().all() and (y.double() - exact).norm() < 0.01 * exact.norm()
