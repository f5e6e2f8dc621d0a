import pytest
import torch
from torch import nn

from slab_det.fusion.rules import fold_into_input, fold_into_output

LAYERS = [
    lambda bias: nn.Linear(6, 4, bias=bias),
    lambda bias: nn.Conv2d(6, 4, 1, bias=bias),
    lambda bias: nn.Conv2d(6, 4, 3, stride=2, bias=bias),
]


def _input(layer):
    return torch.randn(5, 6).double() if isinstance(layer, nn.Linear) else torch.randn(2, 6, 9, 8).double()


def _per_channel(x, scale, shift):
    view = (-1,) if x.ndim == 2 else (-1, 1, 1)
    return x * scale.view(view) + shift.view(view)


@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('build', LAYERS)
def test_fold_into_input(build, bias):
    layer = build(bias).double()
    x, scale, shift = _input(layer), torch.randn(6).double(), torch.randn(6).double()
    expected = layer(_per_channel(x, scale, shift))
    fold_into_input(layer, scale, shift)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('build', [*LAYERS, lambda bias: nn.Conv2d(6, 4, 3, padding=1, groups=2, bias=bias)])
def test_fold_into_output_scales_all_of_the_bias(build, bias):
    layer = build(bias).double()
    x, scale, shift = _input(layer), torch.randn(4).double(), torch.randn(4).double()
    expected = _per_channel(layer(x), scale, shift)
    fold_into_output(layer, scale, shift)
    torch.testing.assert_close(layer(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('conv', [nn.Conv2d(6, 4, 3, padding=1), nn.Conv2d(6, 4, 1, groups=2)])
def test_fold_into_the_input_of_a_padded_or_grouped_convolution_is_refused(conv):
    before = conv.weight.clone()
    with pytest.raises(ValueError, match='padding=0'):
        fold_into_input(conv, torch.ones(6).double(), torch.ones(6).double())
    assert torch.equal(conv.weight, before)


def test_folds_are_computed_in_float64():
    layer = nn.Linear(64, 8)
    reference = nn.Linear(64, 8).double()
    reference.load_state_dict(layer.state_dict())
    scale, shift = torch.randn(64).double(), torch.randn(64).double() * 1e4
    bias = reference.bias + (reference.weight * shift).sum(1)
    fold_into_input(layer, scale, shift)
    assert torch.equal(layer.bias, bias.float())
