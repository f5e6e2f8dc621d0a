"""Behaviour that all backbones share: mmdet's results, keys and arguments, clear errors, frozen statistics."""

import copy
import inspect

import pytest
import torch
from conftest import PVT_V2, differing, randomize, relative_difference
from mmdet.models.backbones import PyramidVisionTransformer, PyramidVisionTransformerV2, SwinTransformer
from mmdet.registry import MODELS
from mmengine.model.weight_init import PretrainedInit
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from slab_det.norms import set_gamma

SWIN = dict(
    type='SLABSwin', embed_dims=8, depths=(2, 2, 2), num_heads=(1, 2, 4), strides=(4, 2, 2), out_indices=(0, 1, 2)
)
PVT = dict(type='SLABPVT', embed_dims=8, num_layers=(2, 1, 2, 1), num_heads=(1, 2, 3, 4), mlp_ratios=(3, 2, 2, 2))
V2 = {**PVT, **PVT_V2}
CSWIN = dict(
    type='SLABCSwin',
    embed_dims=8,
    depths=(1, 1, 2, 2),
    num_heads=(2, 2, 4, 4),
    pretrain_img_size=64,
    drop_path_rate=0.0,
)
VIT = dict(type='SLABViT', embed_dims=16, num_layers=2, num_heads=2, pretrain_img_size=64, norm_cfg=dict(type='PRepBN'))
PER_STAGE = 'num_layers num_heads patch_sizes strides paddings sr_ratios mlp_ratios la_sr_ratios'.split()
ALL = pytest.mark.parametrize('small', [SWIN, PVT, CSWIN], ids=['Swin', 'PVT', 'CSWin'])


def build(small: dict, **options) -> nn.Module:
    return MODELS.build({**small, **options})


def twins(small: dict, **options) -> tuple[nn.Module, nn.Module]:
    """Our backbone and mmdet's with the same random weights, in float64."""
    ours = build(small, **options).double()
    if small is V2:
        theirs = PyramidVisionTransformerV2(**{k: v for k, v in {**PVT, **options}.items() if k != 'type'})
    else:
        kind = SwinTransformer if small is SWIN else PyramidVisionTransformer
        theirs = kind(**{k: v for k, v in {**small, **options}.items() if k != 'type'})
    ours.load_state_dict(randomize(theirs.double()).state_dict(), strict=True)
    return ours, theirs


@pytest.mark.parametrize('size', [(224, 224), (75, 103), (113, 64)])
@pytest.mark.parametrize(
    ('small', 'options'),
    [
        (SWIN, {}),
        (SWIN, dict(window_size=4, qkv_bias=False)),
        (SWIN, dict(window_size=5, patch_norm=False, qk_scale=0.3, out_indices=(1, 2))),
        (PVT, {}),
        (PVT, dict(qkv_bias=False, norm_after_stage=True, out_indices=(1, 3), pretrain_img_size=(96, 160))),
        (PVT, dict(paddings=[0, 'corner', 'same', (1, 1)], patch_sizes=[4, 2, 3, 2])),
        (V2, dict(sr_ratios=(4, 2, 1, 1), qkv_bias=False)),
    ],
    ids=str,
)
@torch.no_grad()
def test_equals_mmdet_given_the_same_state_dict(size, small, options):
    ours, theirs = twins(small, **options)
    ours.eval(), theirs.eval()
    x = torch.randn(2, 3, *size, dtype=torch.double)
    assert relative_difference(ours(x), theirs(x)) < 1e-9


@pytest.mark.parametrize('drop_path_rate', [0.0, 0.6])
@pytest.mark.parametrize('small', [SWIN, PVT, V2], ids=['Swin', 'PVT', 'V2'])
def test_training_outputs_and_gradients_equal_mmdet(small, drop_path_rate):
    ours, theirs = twins(small, drop_path_rate=drop_path_rate)
    x = torch.randn(2, 3, 77, 106, dtype=torch.double)
    outputs = []
    for model in (ours, theirs):
        model.train()
        torch.manual_seed(4)
        outputs.append(model(x))
        sum(out.pow(2).mean() for out in outputs[-1]).backward()
    assert relative_difference(*outputs) < 1e-9
    # load_state_dict puts the channels of mmdet's gradients in our order, as it does for weights.
    expected = build(small).double()
    expected.load_state_dict({name: parameter.grad for name, parameter in theirs.named_parameters()}, strict=False)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.get_parameter(name), rtol=1e-9, atol=1e-12, msg=name)


PVT_SIZES, V2_SIZES = [(16, 24), (8, 12), (4, 6), (2, 3)], [(17, 25), (9, 13), (5, 7), (3, 4)]


@pytest.mark.parametrize(
    ('small', 'options', 'sizes'),
    [
        (PVT, dict(attention=('sla', 'focused', 'softmax', 'sla'), la_sr_ratios=(2, 1, 1, 1)), PVT_SIZES),
        (PVT, dict(attention='focused', ffn_norm='pre_act', drop_rate=0.1), PVT_SIZES),
        (PVT, dict(ffn_norm='post_act', norm_eval=True), PVT_SIZES),
        (V2, dict(attention='sla', drop_rate=0.1), V2_SIZES),
        (VIT, dict(), [(5, 7)]),
        (VIT, dict(attention='sla'), [(5, 7)]),
        (VIT, dict(attention='focused'), [(5, 7)]),
        (VIT, dict(out_type='cls_token'), [()]),
    ],
    ids=str,
)
def test_any_size_trains(small, options, sizes):
    model = build(small, **options, norm_cfg=dict(type='PRepBN', ln_eps=1e-6), drop_path_rate=0.2)
    model.init_weights()
    set_gamma(model, 0.5)
    outs = model.train()(torch.randn(2, 3, 66, 97))
    assert [out.shape[2:] for out in outs] == sizes
    assert all(out.is_contiguous() for out in outs if out.ndim == 4)
    sum(out.square().mean() for out in outs).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.isfinite().all()] == []


@pytest.mark.parametrize(('kind', 'theirs'), [('SLABSwin', SwinTransformer), ('SLABPVT', PyramidVisionTransformer)])
def test_positions_and_defaults_of_arguments_equal_mmdet(kind, theirs):
    ours, reference = (inspect.signature(kind).parameters for kind in (MODELS.get(kind), theirs))
    assert list(ours)[: len(reference)] == list(reference), 'positional arguments mean the same'
    for name, parameter in reference.items():
        assert ours[name].default == parameter.default, name


@pytest.mark.parametrize(
    ('small', 'options', 'message'),
    [
        (SWIN, dict(norm_cfg=dict(type='NoNorm')), 'norm_cfg=.*NoNorm.*PRepBN'),
        (SWIN, dict(ffn_norm='before'), 'unknown ffn_norm.*pre_act.*post_act'),
        (PVT, dict(attention=('sla', 'linear', 'softmax', 'softmax')), "unknown attention 'linear'.*focused"),
        (PVT, dict(pretrained='a.pth', init_cfg=dict(type='Pretrained', checkpoint='b.pth')), 'two sources'),
        (SWIN, dict(strides=(2, 2, 2)), 'patches must not overlap'),
        (PVT, dict(ffn_norm='pre_act', use_conv_ffn=True), 'use_conv_ffn=False'),
        # One value for each stage: neither fewer nor more.
        (SWIN, dict(attention=('sla', 'sla')), 'attention=.*2 values for 3 stages'),
        (SWIN, dict(attention=['sla'] * 4), 'attention=.*4 values for 3 stages'),
        (SWIN, dict(attention=(['sla'],) * 3), 'unknown attention'),
        (SWIN, dict(window_sizes=(7, 7)), 'window_sizes=.*2 values for 3 stages'),
        (SWIN, dict(window_sizes=(7, 0, 7)), 'window_sizes=.*whole numbers from 1'),
        (SWIN, dict(num_heads=(1, 2)), 'num_heads=.*2 values'),
        (SWIN, dict(num_heads=(1, 2.0, 4)), 'num_heads=.*whole numbers'),
        (SWIN, dict(strides=(4, 2)), 'strides=.*2 values'),
        (SWIN, dict(depths=3), 'depths=3'),
        (SWIN, dict(depths=()), 'depths='),
        (SWIN, dict(depths=(1, -1, 1)), 'depths=.*from 0'),
        (SWIN, dict(out_indices=(0, 3)), 'out_indices=.*from 0 to 2'),
        (SWIN, dict(mlp_ratio=0.01), 'feedforward_channels=0'),
        (PVT, dict(attention=('softmax',) * 5), 'attention=.*5 values for 4 stages'),
        (PVT, dict(out_indices=(0, 1, 4)), 'out_indices=.*from 0 to 3'),
        (PVT, dict(out_indices=(1, 1)), 'out_indices=.*different'),
        (PVT, dict(out_indices=(-1,)), 'out_indices'),
        (PVT, dict(out_indices=2), 'out_indices=2'),
        *((PVT, {name: (1, 1, 1)}, f'{name}=.*3 values for 4 stages') for name in PER_STAGE),
        *((PVT, {name: (1,) * 5}, f'{name}=.*5 values for 4 stages') for name in PER_STAGE),
        (PVT, dict(sr_ratios=(8, 4, 2, 0)), 'sr_ratios=.*from 1'),
        (PVT, dict(attention='sla', pretrain_img_size=8), 'pretrain_img_size'),
        (PVT, dict(pretrain_img_size=16), 'pretrain_img_size=.*smaller'),
        (CSWIN, dict(stripe_widths=(1, 2)), 'stripe_widths=.*2 values'),
        (CSWIN, dict(stripe_widths=(0, 2, 7, None)), 'stripe_widths=.*from 1'),
        # Heads divide the channels.
        (SWIN, dict(num_heads=(3, 2, 4)), '8 channels.*num_heads=3'),
        (SWIN, dict(embed_dims=9, num_heads=(1, 4, 4)), '18 channels.*num_heads=4'),
        (PVT, dict(num_heads=(1, 2, 3, 4), embed_dims=0), 'embed_dims=0'),
        (CSWIN, dict(num_heads=(1, 2, 4, 8)), 'num_heads=1.*even'),
        (CSWIN, dict(num_heads=(2, 2, 5, 8)), '32 channels.*num_heads=5'),
        (VIT, dict(num_heads=3), '16 channels.*num_heads=3'),
        (VIT, dict(num_heads=0), 'num_heads=0'),
        (VIT, dict(attention=['sla']), 'unknown attention'),
    ],
)
def test_wrong_arguments_are_named(small, options, message):
    with pytest.raises(ValueError, match=message):
        build(small, **options)


def test_defaults_and_single_values_serve_any_number_of_stages():
    small = dict(type='SLABSwin', embed_dims=24, depths=(1, 1), out_indices=[0, 1])
    assert [stage.blocks[0].attn.w_msa.num_heads for stage in build(small).stages] == [3, 6]
    assert [stage.blocks[0].attn.w_msa.num_heads for stage in build(small, num_heads=2).stages] == [2, 2]
    assert len(build(PVT, num_stages=4, la_sr_ratios=1, attention='sla')(torch.zeros(1, 3, 64, 64))) == 4


@pytest.mark.parametrize(
    ('small', 'spelling'),
    [
        (SWIN, 'pretrained'),
        # As mmengine takes it too.
        (SWIN, dict(type=PretrainedInit, map_location='cpu')),
        (PVT, 'pretrained'),
        (CSWIN, dict(type='Pretrained')),
    ],
    ids=str,
)
def test_pretrained_weights_are_loaded(tmp_path, small, spelling):
    source, path = randomize(build(small)), str(tmp_path / 'weights.pth')
    torch.save(dict(state_dict=source.state_dict()), path)
    named = dict(pretrained=path) if spelling == 'pretrained' else dict(init_cfg=dict(spelling, checkpoint=path))
    model = build(small, **named)
    model.init_weights()
    assert not differing(model, source)


@ALL
def test_norm_eval_freezes_loaded_statistics_only(small):
    source, model = (build(small, norm_cfg=dict(type='PRepBN'), norm_eval=True) for _ in range(2))
    block = {'SLABSwin': 'stages.2.blocks.1.norm1', 'SLABPVT': 'layers.3.1.1.norm1'}.get(
        small['type'], 'stages.3.1.1.norm1'
    )
    norm = randomize(source).get_submodule(block)
    # Initial statistics do not count as loaded.
    norm.set_statistics(torch.zeros(norm.num_features), torch.ones(norm.num_features))
    model.load_state_dict(source.state_dict())
    set_gamma(model, 0.0)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.train()
    # mmengine calls train() in each iteration; to read a number there would wait for a GPU, once for each frozen norm.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr('slab_det.norms.progressive.read_number', None)
        model.train()
    model(torch.randn(2, 3, 64, 64))
    moved = differing(model, before)
    assert moved and all(key.startswith(f'{block}.') for key in moved)
    assert all(parameter.requires_grad for parameter in model.parameters())


@ALL
@pytest.mark.parametrize('word', ['softmax', 'sla', 'focused'])
def test_attention_dropout_drops_softmax_weights_only(small, word):
    model = build(small, attention=word, attn_drop_rate=0.5, drop_path_rate=0.0).train()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        same = all(torch.equal(one, other) for one, other in zip(model(x), model(x), strict=True))
    assert same == (word != 'softmax')


def test_a_compiled_backbone_trains_to_the_same_weights_and_statistics():
    """As with mmengine's ``compile=True``, and without a graph for every gamma."""
    torch._dynamo.reset()
    options = dict(depths=(1,), num_heads=(1,), strides=(4,), out_indices=(0,), drop_path_rate=0.0)
    eager = build(SWIN, **options, norm_cfg=dict(type='PRepBN'), with_cp=True).train()
    backbone, start = copy.deepcopy(eager), copy.deepcopy(eager.state_dict())
    # Traces and guards as every backend, and needs no C++ compiler.
    counter = CompileCounterWithBackend('aot_eager')
    runs = [
        (model, forward, torch.optim.SGD(model.parameters(), lr=0.01))
        for model, forward in ((eager, eager), (backbone, torch.compile(backbone, backend=counter)))
    ]
    graphs = []
    for width, gamma in ((64, 1.0), (96, 0.8), (64, 0.6), (96, 0.4), (64, 0.2), (96, 0.0), (64, 0.0)):
        images = torch.randn(2, 3, 64, width)
        for model, forward, optimizer in runs:
            set_gamma(model, gamma)
            optimizer.zero_grad()
            sum(feature.square().mean() for feature in forward(images)).backward()
            optimizer.step()
        for name, value in eager.state_dict().items():
            torch.testing.assert_close(
                backbone.state_dict()[name], value, rtol=1e-5, atol=1e-6, msg=f'{name} at gamma {gamma}'
            )
        graphs.append(counter.frame_count)
    assert any('running_var' in name for name in differing(backbone, start))
    # One set of graphs per width, and one for gamma = 0, which is another computation; none per gamma.
    assert 0 < graphs[0] < graphs[1] == graphs[4] <= graphs[5] == graphs[6]
