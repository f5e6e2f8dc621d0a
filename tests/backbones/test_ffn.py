"""The FFN with one more norm (BN+FFNBN)."""

import pytest
import torch
import torch.nn.functional as F
from mmcv.cnn.bricks.transformer import FFN
from torch import nn

from slab_det.backbones.ffn import NORMED_FFNS, build_ffn

OPTIONS = dict(embed_dims=6, feedforward_channels=10, act_cfg=dict(type='GELU'))


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


@pytest.mark.parametrize('training', [False, True])
@pytest.mark.parametrize('ffn_norm', ['pre_act', 'post_act'])
def test_the_norm_stands_where_its_name_says(ffn_norm, training):
    ffn = randomize(build_ffn(ffn_norm, dict(type='TokenBN'), **OPTIONS).double()).train(training)
    state = {key: value.clone() for key, value in ffn.state_dict().items()}
    x, identity = torch.randn(2, 7, 6).double(), torch.randn(2, 7, 6).double()
    hidden = x @ state['layers.0.0.weight'].T + state['layers.0.0.bias']
    if ffn_norm == 'pre_act':
        hidden = F.gelu(batch_norm(hidden, state, training))
    else:
        hidden = batch_norm(F.gelu(hidden), state, training)
    expected = hidden @ state['layers.1.weight'].T + state['layers.1.bias']
    torch.testing.assert_close(ffn(x, identity), expected + identity, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ffn(x), expected + x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize('training', [False, True])
@pytest.mark.parametrize('ffn_norm', ['pre_act', 'post_act'])
@pytest.mark.parametrize('options', [{}, dict(add_identity=False), dict(layer_scale_init_value=0.3)], ids=str)
def test_without_its_norm_it_is_mmcvs_ffn_to_the_bit(ffn_norm, options, training):
    options = {**OPTIONS, 'ffn_drop': 0.2, 'dropout_layer': dict(type='DropPath', drop_prob=0.4), **options}
    ours, theirs = build_ffn(ffn_norm, dict(type='TokenBN'), **options), randomize(FFN(num_fcs=2, **options))
    ours.norm = nn.Identity()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x, identity = torch.randn(5, 7, 6), torch.randn(5, 7, 6)
    outputs = []
    for ffn in (ours, theirs):
        torch.manual_seed(4)
        outputs.append(ffn.train(training)(x, identity))
    assert torch.equal(*outputs)


def test_the_norm_after_the_activation_sees_no_dropout():
    """Dropout would widen the statistics of training, which inference uses."""
    ffn = build_ffn('post_act', dict(type='TokenBN', momentum=1.0), ffn_drop=0.5, **OPTIONS).train()
    x = torch.randn(4, 9, 6)
    ffn(x)
    hidden = F.gelu(ffn.layers[0][0](x)).flatten(0, 1)
    torch.testing.assert_close(ffn.norm.running_var, hidden.var(0))


@pytest.mark.parametrize('norm', ['TokenBN', 'RepBN', 'PRepBN', 'UN', 'LN'])
@pytest.mark.parametrize('ffn_norm', ['pre_act', 'post_act'])
def test_trains_with_an_activation_that_works_in_place(ffn_norm, norm):
    ffn = build_ffn(
        ffn_norm, dict(type=norm), embed_dims=6, feedforward_channels=10, act_cfg=dict(type='ReLU', inplace=True)
    )
    ffn(torch.randn(2, 7, 6)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in ffn.parameters())


def test_none_is_mmcvs_ffn():
    assert type(build_ffn(None, dict(type='TokenBN'), **OPTIONS)) is FFN


def test_an_unknown_word_names_the_choices():
    with pytest.raises(ValueError, match=r"unknown ffn_norm 'before': choose from \[None, 'pre_act', 'post_act'\]"):
        build_ffn('before', dict(type='TokenBN'), **OPTIONS)
    assert set(NORMED_FFNS) == {'pre_act', 'post_act'}
