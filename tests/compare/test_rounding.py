import copy

import pytest
import torch
from torch import nn

from slab_det.compare.difference import explain_rounding, rms_difference, run_rounded


def rounded(x, dtype):
    return x.to(dtype).float()


class Steps(nn.Module):
    """A product, a write through a view, an addition in place and an integer index."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5, generator=torch.Generator().manual_seed(1)))
        self.register_buffer('order', torch.tensor([4, 3, 2, 1, 0]))

    def forward(self, x):
        y = x @ self.weight
        y[:, 1:3] = x[:, 1:3] * 3
        y.add_(x)
        return y[:, self.order], y.argmax(1)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=str)
def test_every_result_is_rounded_and_the_model_keeps_its_weights(dtype):
    model, x = Steps(), torch.randn(7, 5)
    before = model.weight.clone()
    found, places = run_rounded(model, dtype, lambda model: model(rounded(x, dtype)))
    weight, x = rounded(model.weight, dtype), rounded(x, dtype)
    expected = rounded(x @ weight, dtype)
    expected[:, 1:3] = rounded(x[:, 1:3] * 3, dtype)
    expected = rounded(expected + x, dtype)
    assert torch.equal(found, expected.flip(1)) and torch.equal(places, expected.argmax(1))
    assert torch.equal(model.weight, before) and not torch.equal(before, weight)


def test_rounding_is_as_large_as_in_half_precision():
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    model, x = nn.Sequential(*layers).requires_grad_(False), torch.randn(50, 64)
    reference = model.double()(x.double())
    (simulated,) = run_rounded(model.float(), torch.bfloat16, lambda model: [model(rounded(x, torch.bfloat16))])
    real = model.bfloat16()(x.bfloat16())
    ratio = rms_difference(real, reference) / rms_difference(simulated, reference)
    assert 0.7 < ratio < 1.4, ratio


@pytest.mark.parametrize('dtype', [torch.float16, torch.float32, torch.float64], ids=str)
def test_rounding_explains_as_many_eps_in_every_dtype(dtype):
    model, x = nn.Linear(512, 64), torch.randn(50, 512)
    reference = copy.deepcopy(model).double()(x.double())
    # Results and weights are rounded by at most half an eps, and each of 512 sums in float32.
    (rounding,) = explain_rounding(model, dtype, lambda model: [model(x.to(model.weight))], [reference])
    assert 0.05 < rounding / torch.finfo(dtype).eps < 512**0.5
    assert model.weight.dtype == torch.float32
