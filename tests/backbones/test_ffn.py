"""The FFN of Swin and of PVT, with one more norm (BN+FFNBN) and without."""

import pytest
import torch
import torch.nn.functional as F

from slab_det.backbones.blocks import ConvFFN, LinearFFN

GELU = dict(type='GELU')
KINDS = pytest.mark.parametrize('kind', [LinearFFN, ConvFFN])
NORMS = pytest.mark.parametrize('ffn_norm', ['pre_act', 'post_act'])


@torch.no_grad()
def randomize(ffn):
    for name, value in ffn.state_dict().items():
        value.uniform_(0.5, 2) if name.endswith('running_var') else value.normal_()
    return ffn


def batch_norm(x, state, training):
    """y = weight (x - mean) / sqrt(var + eps) + bias, per channel over all tokens."""
    mean = x.mean((0, 1)) if training else state['norm.running_mean']
    var = (x - mean).square().mean((0, 1)) if training else state['norm.running_var']
    return state['norm.weight'] * (x - mean) / (var + 1e-5).sqrt() + state['norm.bias']


@KINDS
@NORMS
@pytest.mark.parametrize('training', [False, True])
def test_the_norm_stands_where_its_name_says(kind, ffn_norm, training):
    ffn = kind(6, 10, GELU, ffn_norm=ffn_norm, norm_cfg=dict(type='TokenBN')).double()
    state = {key: value.clone() for key, value in randomize(ffn).train(training).state_dict().items()}
    x, identity = torch.randn(2, 7, 6).double(), torch.randn(2, 7, 6).double()
    hidden = x @ state[f'{ffn.fc1}.weight'].flatten(1).T + state[f'{ffn.fc1}.bias']
    if ffn_norm == 'pre_act':
        hidden = F.gelu(batch_norm(hidden, state, training))
    else:
        hidden = batch_norm(F.gelu(hidden), state, training)
    expected = hidden @ state[f'{ffn.fc2}.weight'].flatten(1).T + state[f'{ffn.fc2}.bias'] + identity
    torch.testing.assert_close(ffn(x, (1, 7), identity), expected, rtol=1e-12, atol=1e-12)


@KINDS
def test_the_norm_after_the_activation_sees_no_dropout(kind):
    """Dropout would raise the running variance, which inference uses."""
    ffn = kind(6, 10, GELU, drop_rate=0.5, ffn_norm='post_act', norm_cfg=dict(type='TokenBN', momentum=1.0)).train()
    x = torch.randn(4, 9, 6)
    ffn(x, (3, 3), x)
    fc1 = ffn.get_submodule(ffn.fc1)
    hidden = F.gelu(F.linear(x, fc1.weight.flatten(1), fc1.bias)).flatten(0, 1)
    torch.testing.assert_close(ffn.norm.running_var, hidden.var(0))
