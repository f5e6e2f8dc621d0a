"""SLABPVT against mmdet's PVT and PVTv2, and what its own arguments promise."""

import inspect
import warnings

import pytest
import torch
from mmdet.models.backbones import PyramidVisionTransformer, PyramidVisionTransformerV2
from mmdet.registry import MODELS
from torch import nn
from torch.export import Dim, export

import slab_det
from slab_det.attention import FocusedMapAttention, SimplifiedMapAttention, SoftmaxMapAttention
from slab_det.backbones import SLABPVT
from slab_det.norms import PRepBN, set_gamma

SMALL = dict(embed_dims=8, num_layers=(2, 1, 2, 1), num_heads=(1, 2, 3, 4), mlp_ratios=(3, 2, 2, 2))
V2 = dict(
    patch_sizes=[7, 3, 3, 3], paddings=[3, 1, 1, 1], use_abs_pos_embed=False, norm_after_stage=True, use_conv_ffn=True
)
MIXED = dict(attention=('sla', 'focused', 'softmax', 'sla'), la_sr_ratios=(2, 1, 1, 1))
PREPBN = dict(type='PRepBN', ln_eps=1e-6)


@torch.no_grad()
def randomize(model: nn.Module) -> nn.Module:
    for name, value in model.state_dict().items():
        if name.endswith('running_var'):
            value.uniform_(0.5, 2)
        elif value.is_floating_point() and not name.endswith('_gamma'):
            value.normal_(std=0.3)
    return model


def twins(version, **config):
    """SLABPVT and mmdet's class with the same random weights, in float64."""
    config = {**SMALL, **config}
    theirs = randomize((PyramidVisionTransformerV2 if version == 'V2' else PyramidVisionTransformer)(**config)).double()
    ours = SLABPVT(**{**(V2 if version == 'V2' else {}), **config}).double()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def assert_same(ours, theirs, tolerance=1e-10):
    for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.shape == other.shape, f'output {i}'
        error = ((one - other).abs().max() / other.abs().max()).item()
        assert error < tolerance, f'output {i}: relative error {error:.1e}'


@pytest.mark.parametrize('size', [(224, 224), (75, 103), (113, 64), (71, 150)])
@pytest.mark.parametrize(
    'config',
    [
        dict(version='V1'),
        dict(version='V2'),
        dict(version='V1', qkv_bias=False, norm_after_stage=True, out_indices=(1, 3), pretrain_img_size=(96, 160)),
        dict(version='V2', sr_ratios=(4, 2, 1, 1), qkv_bias=False),
        dict(version='V1', paddings=[0, 'corner', 'same', (1, 1)], patch_sizes=[4, 2, 3, 2]),
    ],
    ids=str,
)
@torch.no_grad()
def test_equals_mmdet_given_the_same_state_dict(size, config):
    ours, theirs = (model.eval() for model in twins(**config))
    x = torch.randn(2, 3, *size, dtype=torch.double)
    assert_same(ours(x), theirs(x))


@pytest.mark.parametrize('drop_path_rate', [0.0, 0.6])
@pytest.mark.parametrize('version', ['V1', 'V2'])
def test_training_outputs_and_gradients_equal_mmdet(version, drop_path_rate):
    ours, theirs = twins(version, drop_path_rate=drop_path_rate)
    x = torch.randn(2, 3, 77, 106, dtype=torch.double)
    outputs = []
    for model in (ours, theirs):
        model.train()
        torch.manual_seed(4)
        outputs.append(model(x))
        sum(out.pow(2).mean() for out in outputs[-1]).backward()
    assert_same(*outputs)
    reference = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, reference[name].grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize('version', ['V1', 'V2'])
def test_starts_from_scratch_with_the_weights_of_mmdet(version):
    kinds = {'V1': (SLABPVT, PyramidVisionTransformer, {}), 'V2': (SLABPVT, PyramidVisionTransformerV2, V2)}
    kind, their_kind, extra = kinds[version]
    torch.manual_seed(5)
    ours = kind(**SMALL, **extra)
    ours.init_weights()
    torch.manual_seed(5)
    theirs = their_kind(**SMALL)
    theirs.init_weights()
    state = theirs.state_dict()
    assert list(ours.state_dict()) == list(state)
    for key, value in ours.state_dict().items():
        assert torch.equal(value, state[key]), key


def test_linear_attention_starts_without_position_and_with_a_released_convolution():
    model = SLABPVT(**SMALL, **MIXED, norm_cfg=PREPBN)
    convolution = model.layers[0][1][1].attn.dwc.weight.clone()
    model.init_weights()
    linear = [name for name, _ in model.named_parameters() if name.endswith('positional_encoding')]
    assert len(linear) == 2 + 1 + 1
    assert not any(model.get_parameter(name).any() for name in linear)
    assert torch.equal(model.layers[0][1][1].attn.dwc.weight, convolution)
    assert all(norm.gamma == 1.0 for norm in model.modules() if isinstance(norm, PRepBN))


def test_arguments_and_keys_are_mmdets():
    ours, theirs = (inspect.signature(kind).parameters for kind in (SLABPVT, PyramidVisionTransformer))
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
    assert list(ours)[: len(theirs)] == list(theirs), 'positional arguments mean the same'
    for kind, extra in ((PyramidVisionTransformer, {}), (PyramidVisionTransformerV2, V2)):
        assert {key: value.shape for key, value in SLABPVT(**extra).state_dict().items()} == {
            key: value.shape for key, value in kind().state_dict().items()
        }
    assert MODELS.get('SLABPVT') is SLABPVT


def test_one_word_or_one_per_stage():
    model = SLABPVT(**SMALL, **MIXED)
    attentions = [[block.attn for block in blocks if hasattr(block, 'attn')] for _, blocks, _ in model.layers]
    assert [{type(attn) for attn in stage} for stage in attentions] == [
        {SimplifiedMapAttention},
        {FocusedMapAttention},
        {SoftmaxMapAttention},
        {SimplifiedMapAttention},
    ]
    assert [[attn.sr_ratio for attn in stage] for stage in attentions] == [[2, 2], [1], [2, 2], [1]]
    # Half of the 56 x 56 positions of stage 0, all 28 x 28 of stage 1.
    assert attentions[0][0].positional_encoding.shape == (1, 28 * 28, 8)
    assert attentions[1][0].positional_encoding.shape == (1, 28 * 28, 16)
    with_sla = {key for key in SLABPVT(**SMALL, attention='sla').state_dict() if key.startswith('layers.0.1.1.attn.')}
    assert with_sla == {
        f'layers.0.1.1.attn.{key}'
        for key in (
            'attn.in_proj_weight',
            'attn.in_proj_bias',
            'attn.out_proj.weight',
            'attn.out_proj.bias',
            'positional_encoding',
            'dwc.weight',
            'dwc.bias',
        )
    }


def test_linear_positions_are_those_of_overlapping_patches():
    model = SLABPVT(**SMALL, **V2, attention='sla', pretrain_img_size=(100, 70))
    # (100 + 6 - 7) // 4 + 1 = 25, (25 + 2 - 3) // 2 + 1 = 13, 7, 4; (70 + 6 - 7) // 4 + 1 = 18, 9, 5, 3
    sizes = [blocks[0].attn.positional_encoding.shape[1] for _, blocks, _ in model.layers]
    assert sizes == [25 * 18, 13 * 9, 7 * 5, 4 * 3]


@pytest.mark.parametrize(
    'config',
    [
        {},
        MIXED,
        dict(V2, attention='sla'),
        dict(attention='focused', ffn_norm='pre_act'),
        dict(ffn_norm='post_act', norm_eval=True),
    ],
    ids=str,
)
def test_any_size_trains(config):
    model = SLABPVT(**SMALL, **config, norm_cfg=PREPBN, drop_rate=0.1, drop_path_rate=0.2)
    set_gamma(model, 0.5)
    model.train()
    outs = model(torch.randn(2, 3, 66, 97))
    side = (lambda n: -(-n // 2)) if 'paddings' in config else (lambda n: n // 2)
    height, width = side(side(66)), side(side(97))
    for heads, out in zip(SMALL['num_heads'], outs, strict=True):
        assert out.shape == (2, 8 * heads, height, width) and out.is_contiguous()
        height, width = side(height), side(width)
    sum(out.square().mean() for out in outs).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


@pytest.mark.parametrize('word', ['softmax', 'sla', 'focused'])
def test_attention_dropout_drops_softmax_weights_only(word):
    model = SLABPVT(**SMALL, attention=word, attn_drop_rate=0.5, drop_path_rate=0.0).train()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        same = all(torch.equal(one, other) for one, other in zip(model(x), model(x), strict=True))
    assert same == (word != 'softmax')


@torch.no_grad()
def test_drop_rate_drops_after_positions_attention_and_ffn():
    embedding, block = SLABPVT(**SMALL, drop_rate=0.3, drop_path_rate=0.0).train().layers[1][1]
    x = torch.randn(1, 30 * 40, 16)
    for layer in (embedding, block.attn, block.ffn):
        share = (layer(x, (30, 40)) == 0).float().mean().item()
        assert 0.27 < share < 0.33, type(layer)


@pytest.mark.parametrize('place', ['pre_act', 'post_act'])
@torch.no_grad()
def test_ffn_norm_stands_between_the_layers(place):
    model = SLABPVT(**SMALL, norm_cfg=dict(type='TokenBN'), ffn_norm=place)
    assert sum(name.endswith('ffn.norm.running_var') for name in model.state_dict()) == 6
    ffn = randomize(model.layers[2][1][1].ffn).double().eval()
    norm = ffn.norm

    def normalize(x):
        return (x - norm.running_mean) / (norm.running_var + norm.eps).sqrt() * norm.weight + norm.bias

    x = torch.randn(2, 6, 24, dtype=torch.double)
    hidden = x @ ffn.layers[0].weight[:, :, 0, 0].T + ffn.layers[0].bias
    if place == 'pre_act':
        hidden = normalize(hidden)
    hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    if place == 'post_act':
        hidden = normalize(hidden)
    expected = hidden @ ffn.layers[3].weight[:, :, 0, 0].T + ffn.layers[3].bias
    torch.testing.assert_close(ffn(x, (2, 3)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ('config', 'message'),
    [
        (dict(attention='linear'), 'unknown attention.*linear'),
        (dict(attention=('sla', 'softmax')), 'attention=.*4 stages'),
        (dict(num_layers=(1, 1)), 'num_layers=.*4 stages'),
        (dict(num_heads=(1, 2)), 'num_heads=.*4 stages'),
        (dict(sr_ratios=(8, 4, 2)), 'sr_ratios=.*4 stages'),
        (dict(sr_ratios=(8, 4, 2, 0)), 'positive'),
        (dict(la_sr_ratios=(1, 1)), 'la_sr_ratios=.*4 stages'),
        (dict(mlp_ratios=(1, 1)), 'mlp_ratios=.*4 stages'),
        (dict(num_heads=(1, 2, 2, 0)), 'num_heads=.*positive whole numbers'),
        (dict(strides=(4, 2, 2, 0)), 'strides=.*positive whole numbers'),
        (dict(patch_sizes=(4, 2, 2, 0)), 'patch_sizes=.*positive whole numbers'),
        (dict(num_layers=(1, 1, 1, 1.5)), 'num_layers=.*0 or more'),
        (dict(mlp_ratios=(1, 1, 1, 0)), 'mlp_ratios=0 leaves no hidden channel'),
        (dict(pretrain_img_size=2, sr_ratios=1), r'2x2 leaves stage \d'),
        (dict(embed_dims=0), 'embed_dims=0: give positive whole numbers'),
        (dict(out_indices=(0, 4)), r'out_indices=\(0, 4\)'),
        (dict(out_indices=(-1,)), r'out_indices=\(-1,\)'),
        (dict(out_indices=(0, 0)), r'out_indices=\(0, 0\)'),
        (dict(norm_cfg=dict(type='NoNorm')), "there is no norm called 'NoNorm'"),
        (dict(norm_cfg=dict(type='BN')), 'takes channels first.*TokenBN'),
        (dict(norm_cfg=None), "norm_cfg must be a dict with a 'type'"),
        (dict(pretrain_img_size=16), '16x16 leaves stage 0 a map of 4x4.*ratio 8'),
        (dict(attention='sla', la_sr_ratios=(1, 1, 1, 8)), 'stage 3 a map of 7x7.*ratio 8'),
        (dict(paddings=(0, 'corners', 0, 0)), r"unknown padding \['corners'\].*'same'"),
        (dict(ffn_norm='act'), "unknown ffn_norm 'act'"),
        (dict(ffn_norm='pre_act', use_conv_ffn=True), 'use_conv_ffn=False'),
        (dict(pretrained='a.pth', init_cfg=dict(type='Pretrained', checkpoint='b.pth')), 'two sources'),
    ],
)
def test_wrong_arguments_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        SLABPVT(**{**SMALL, **config})


@pytest.mark.parametrize('strict', [False, True])
@pytest.mark.parametrize('config', [{}, MIXED, V2], ids=['V1', 'mixed', 'V2'])
@torch.no_grad()
def test_a_fused_model_exports_once_for_all_sizes(config, strict):
    model = randomize(SLABPVT(**SMALL, **config, norm_cfg=PREPBN)).eval()
    set_gamma(model, 0)
    fused = slab_det.fuse(model)
    side = {'min': 64, 'max': 2048}
    exported = export(
        fused,
        (torch.randn(1, 3, 230, 310),),
        strict=strict,
        dynamic_shapes=({2: Dim('h', **side), 3: Dim('w', **side)},),
    ).module()
    # The size of the position tables, and one where nothing divides.
    for size in ((224, 224), (97, 131)):
        x = torch.randn(1, 3, *size)
        assert_same(exported(x), fused(x), tolerance=1e-5)


@torch.no_grad()
def test_one_word_pads_every_stage():
    model = SLABPVT(**SMALL, paddings='corner')
    assert [tuple(out.shape[2:]) for out in model(torch.randn(1, 3, 65, 97))] == [(17, 25), (9, 13), (5, 7), (3, 4)]


@pytest.mark.parametrize(
    ('config', 'size', 'message'),
    [
        ({}, (64, 31), '64x31 leaves stage 0 a map of 16x7, smaller than its reduction ratio 8'),
        (dict(attention='sla'), (40, 20), 'stage 3 a map of 1x0'),
        (dict(paddings='corner'), (64, 28), '64x28 leaves stage 0 a map of 16x7'),
    ],
)
def test_an_image_that_leaves_too_small_a_map_is_refused(config, size, message):
    with pytest.raises(ValueError, match=message):
        SLABPVT(**SMALL, **config)(torch.randn(1, 3, *size))


def test_fewer_stages_take_the_default_paddings_and_ratios():
    model = SLABPVT(
        embed_dims=8,
        num_stages=2,
        num_layers=(1, 1),
        num_heads=(1, 2),
        patch_sizes=(4, 2),
        strides=(4, 2),
        sr_ratios=(2, 1),
        out_indices=(0, 1),
    )
    assert [out.shape[1] for out in model(torch.randn(1, 3, 32, 32))] == [8, 16]


@pytest.mark.parametrize('init_cfg', [dict(type='Normal'), dict(type='Pretrained')])
def test_init_cfg_other_than_pretrained_is_refused(init_cfg):
    with pytest.raises(ValueError, match='SLABPVT takes init_cfg'):
        SLABPVT(**SMALL, init_cfg=init_cfg).init_weights()


@pytest.mark.parametrize('spelling', ['init_cfg', 'pretrained'])
def test_pretrained_weights_are_loaded(tmp_path, spelling):
    source = randomize(SLABPVT(**SMALL))
    path = str(tmp_path / 'pvt.pth')
    torch.save(dict(state_dict=source.state_dict()), path)
    pretrained = path if spelling == 'pretrained' else dict(type='Pretrained', checkpoint=path)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        model = SLABPVT(**SMALL, **{spelling: pretrained})
    model.init_weights()
    for key, value in model.state_dict().items():
        assert torch.equal(value, source.state_dict()[key]), key


def test_norm_eval_freezes_loaded_statistics_only():
    source, model = (SLABPVT(**SMALL, norm_cfg=PREPBN, norm_eval=True, norm_after_stage=True) for _ in range(2))
    # Initial statistics do not count as loaded.
    randomize(source).layers[3][2].set_statistics(torch.zeros(32), torch.ones(32))
    model.load_state_dict(source.state_dict())
    set_gamma(model, 0.0)
    assert model.train() is model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model(torch.randn(2, 3, 64, 64))
    moved = {
        key.rpartition('.repbn.')[0] for key, value in model.state_dict().items() if not torch.equal(value, before[key])
    }
    assert moved == {'layers.3.2'}
    assert all(parameter.requires_grad for parameter in model.parameters())
