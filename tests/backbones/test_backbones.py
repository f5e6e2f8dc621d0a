"""What our backbones promise alike: mmdet's results, keys and arguments, clear errors, frozen statistics."""

import copy
import inspect
import re
from pathlib import Path

import mmdet
import pytest
import torch
from conftest import CONFIGS, PVT_V2, differing, randomize, relative_difference
from mmdet.models.backbones import PyramidVisionTransformer, PyramidVisionTransformerV2, SwinTransformer
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.model.weight_init import PretrainedInit
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from slab_det.norms import set_gamma
from slab_det.runtime.errors import CheckpointError

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
    # Loaded as weights are, gradients take the order of channels that ours computes in.
    expected = build(small).double()
    expected.load_state_dict({name: parameter.grad for name, parameter in theirs.named_parameters()}, strict=False)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected.get_parameter(name), rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize(('kind', 'theirs'), [('SLABSwin', SwinTransformer), ('SLABPVT', PyramidVisionTransformer)])
def test_arguments_are_mmdets(kind, theirs):
    ours, reference = (inspect.signature(kind).parameters for kind in (MODELS.get(kind), theirs))
    assert list(ours)[: len(reference)] == list(reference), 'positional arguments mean the same'
    for name, parameter in reference.items():
        assert ours[name].default == parameter.default, name


@pytest.mark.parametrize(
    ('small', 'options', 'message'),
    [
        (small, options, message)
        for small in (SWIN, PVT)
        for options, message in (
            (dict(attention='linear'), 'unknown attention.*linear.*choose from'),
            (dict(attention=('sla', 'softmax')), r'attention=.*\d stages'),
            (dict(num_heads=(1, 2)), r'num_heads=.*\d stages'),
            (dict(norm_cfg=dict(type='NoNorm')), 'norm_cfg=.*NoNorm.*PRepBN'),
            (dict(norm_cfg=dict(type='BN')), 'takes channels first.*TokenBN'),
            (dict(ffn_norm='before'), 'unknown ffn_norm.*pre_act.*post_act'),
            (dict(pretrained='a.pth', init_cfg=dict(type='Pretrained', checkpoint='b.pth')), 'two sources'),
        )
    ]
    + [
        (SWIN, dict(strides=(2, 2, 2)), 'patches must not overlap'),
        (SWIN, dict(out_norm_cfg=dict(type='BN')), 'out_norm_cfg: .*channels first'),
        (PVT, dict(ffn_norm='pre_act', use_conv_ffn=True), 'use_conv_ffn=False'),
        (CSWIN, dict(stripe_widths=(1, 2)), r'stripe_widths=.*4 stages'),
        (CSWIN, dict(attention='linear'), 'unknown attention.*linear.*choose from'),
    ],
)
def test_wrong_arguments_are_named(small, options, message):
    with pytest.raises(ValueError, match=message):
        build(small, **options)


@pytest.mark.parametrize('init_cfg', [dict(type='Normal'), dict(type='Pretrained'), [dict(type='Normal')]])
def test_init_cfg_without_a_checkpoint_is_refused(init_cfg):
    with pytest.raises(ValueError, match='SLABSwin takes init_cfg'):
        build(SWIN, init_cfg=init_cfg).init_weights()


@pytest.mark.parametrize(
    ('small', 'spelling'),
    [
        (SWIN, dict(type='Pretrained')),
        (SWIN, 'pretrained'),
        # As mmengine takes it too.
        (SWIN, dict(type=PretrainedInit, map_location='cpu')),
        (PVT, dict(type='Pretrained')),
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
    model.train()(torch.randn(2, 3, 64, 64))
    moved = differing(model, before)
    assert moved and all(key.startswith(f'{block}.') for key in moved)
    assert all(parameter.requires_grad for parameter in model.parameters())


@ALL
def test_train_and_eval_return_the_model_and_set_the_mode(small):
    model = build(small)
    for mode in (True, False):
        assert model.train(mode) is model
        assert {module.training for module in model.modules()} == {mode}
    assert model.eval() is model


@ALL
@pytest.mark.parametrize('word', ['softmax', 'sla', 'focused'])
def test_attention_dropout_drops_softmax_weights_only(small, word):
    model = build(small, attention=word, attn_drop_rate=0.5, drop_path_rate=0.0).train()
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        same = all(torch.equal(one, other) for one, other in zip(model(x), model(x), strict=True))
    assert same == (word != 'softmax')


@pytest.mark.parametrize('norm, with_cp', [('PRepBN', True), ('UN', False)])
def test_a_compiled_backbone_trains_to_the_same_weights_and_statistics(norm, with_cp):
    """As mmengine's ``compile=True`` does; without a graph for every gamma."""
    torch._dynamo.reset()
    options = dict(depths=(1,), num_heads=(1,), strides=(4,), out_indices=(0,), drop_path_rate=0.0)
    eager = build(SWIN, **options, norm_cfg=dict(type=norm), with_cp=with_cp).train()
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
    # One set per width; none for each gamma, but for 0, which is another computation.
    assert 0 < graphs[0] < graphs[1] == graphs[4] <= graphs[5] == graphs[6]


def find_backbones(cfg: object) -> list[dict]:
    """The Swins and PVTs of a config, wherever they stand, with fewer and narrower blocks."""
    if isinstance(cfg, (list, tuple)):
        return [found for part in cfg for found in find_backbones(part)]
    if not isinstance(cfg, dict):
        return []
    if cfg.get('type') == 'SwinTransformer':
        return [{**cfg, 'embed_dims': 4 * cfg['num_heads'][0], 'depths': [min(depth, 2) for depth in cfg['depths']]}]
    if str(cfg.get('type')).startswith('PyramidVisionTransformer'):
        return [{**cfg, 'embed_dims': 8, 'num_layers': [min(depth, 2) for depth in cfg['num_layers']]}]
    return find_backbones([*cfg.values()])


def test_every_swin_and_pvt_config_of_mmdet_takes_our_backbone_by_its_type(tmp_path):
    files = sorted((Path(mmdet.__file__).parent / '.mim/configs').rglob('*.py'))
    # A config without a backbone takes the backbone of its _base_, which is among the files.
    files = [
        file
        for file in files
        if re.search('swin|pvt|SwinTransformer|PyramidVision', file.name + (text := file.read_text()))
        and 'backbone' in text
    ]
    configs = {file.name: Config.fromfile(file) for file in files}
    # Most of them write the same.
    backbones = {
        re.sub("'checkpoint': [^,}]+", '', repr(backbone)): (name, backbone)
        for name, cfg in configs.items()
        for backbone in find_backbones(cfg.to_dict())
    }
    assert {backbone['type'] for _, backbone in backbones.values()} == {
        'SwinTransformer',
        'PyramidVisionTransformer',
        'PyramidVisionTransformerV2',
    }
    checkpoint, images = tmp_path / 'mmdet.pth', torch.randn(2, 3, 70, 103)
    # What the page says that PVTv2 needs besides.
    (options,) = re.findall(r'`(patch_sizes=[^`]*)`', (CONFIGS.parent / 'docs/norms.md').read_text())
    options = ' '.join(options.split())
    for name, backbone in backbones.values():
        theirs = randomize(MODELS.build(backbone))
        theirs.eval()
        torch.save(dict(state_dict=theirs.state_dict()), checkpoint)
        ours = dict(backbone, type='SLABSwin' if backbone['type'] == 'SwinTransformer' else 'SLABPVT')
        ours['init_cfg'] = dict(ours.get('init_cfg') or dict(type='Pretrained'), checkpoint=str(checkpoint))
        if backbone['type'] == 'PyramidVisionTransformerV2':
            with pytest.raises(CheckpointError, match=re.escape(options)):
                MODELS.build(ours).init_weights()
            ours.update(eval(f'dict({options})'))
        model = MODELS.build(ours)
        model.init_weights()
        model.eval()
        with torch.no_grad():
            difference = relative_difference(model(images), theirs(images))
        assert difference < 1e-5, f'{name}: {difference}'
