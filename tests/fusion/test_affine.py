import pytest
import torch
from conftest import differing
from torch import nn

from slab_det.fusion import CannotFold
from slab_det.fusion.affine import THIRDS, fold_into_input, fold_into_output

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


def test_folds_are_computed_in_float64():
    layer = nn.Linear(64, 8)
    reference = nn.Linear(64, 8).double()
    reference.load_state_dict(layer.state_dict())
    scale, shift = torch.randn(64).double(), torch.randn(64).double() * 1e4
    bias = reference.bias + (reference.weight * shift).sum(1)
    fold_into_input(layer, scale, shift)
    assert torch.equal(layer.bias, bias.float())


@pytest.mark.parametrize('bias', [True, False])
@pytest.mark.parametrize('part', THIRDS)
def test_fold_into_some_projections_of_an_attention(part, bias):
    """The oracle applies the affine map only to the queries, keys or values that ``part`` names."""
    layer = nn.MultiheadAttention(6, 2, bias=bias).double().eval()
    nn.init.normal_(layer.in_proj_weight)
    if bias:
        nn.init.normal_(layer.in_proj_bias)
    scale, shift = torch.randn(2, 6).double()
    inputs = dict(zip('qkv', torch.randn(3, 5, 2, 6).double(), strict=True))
    expected = layer(*[x * scale + shift if name in part else x for name, x in inputs.items()])
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    fold_into_input(layer, scale, shift, part)
    for one, other in zip(layer(*inputs.values()), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    for index, name in enumerate('qkv'):
        rows = slice(6 * index, 6 * index + 6)
        same = torch.equal(layer.in_proj_weight[rows], state['in_proj_weight'][rows])
        assert same == (name not in part), name
        if not bias:
            assert layer.in_proj_bias[rows].any() == (name in part), name
    # The fused kernel needs both biases or none, so out_proj gets a bias of zeros.
    assert layer.in_proj_bias.requires_grad and not layer.out_proj.bias.any()


class OtherConv2d(nn.Conv2d):
    """A subclass, which may compute its weight."""


def computed_linear():
    layer = nn.Linear(6, 4)
    weight = layer.weight
    del layer.weight
    layer.weight = 2 * weight.detach()
    return layer


@pytest.mark.parametrize(
    ('layer', 'side', 'part', 'reason'),
    [
        (nn.Conv2d(6, 4, 3, padding=1), 'input', '', 'padding=0'),
        (nn.Conv2d(6, 4, 1, groups=2), 'input', '', 'groups=1'),
        (OtherConv2d(6, 4, 1), 'input', '', 'OtherConv2d'),
        (nn.Linear(6, 18), 'input', 'q', 'a part of a Linear'),
        (nn.MultiheadAttention(6, 2), 'input', '', 'only into packed inputs q, k, v'),
        (nn.MultiheadAttention(6, 2), 'output', '', 'only into packed inputs'),
        (nn.MultiheadAttention(6, 2, kdim=4), 'input', 'q', 'only into packed'),
        (computed_linear(), 'input', '', 'its weight is no parameter'),
    ],
)
def test_other_layers_refuse_the_map_and_stay_as_they_are(layer, side, part, reason):
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    affine = torch.ones(6).double(), torch.ones(6).double()
    with pytest.raises(CannotFold, match=reason):
        fold_into_input(layer, *affine, part) if side == 'input' else fold_into_output(layer, *affine)
    assert not differing(layer, before)
