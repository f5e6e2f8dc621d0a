"""LayerNorm models become PRepBN models that compute the same."""

import pytest
import timm
import torch
from conftest import as_trained, differing, randomize, relative_difference
from mmdet.registry import MODELS
from timm.models.metaformer import LayerNormNoBias
from torch import nn

import slab_det
from slab_det.conversion import ConversionError
from slab_det.norms import PRepBN, TokenBN, set_gamma

SMALL = dict(embed_dims=8, depths=(2, 1, 1), num_heads=(1, 2, 2), strides=(4, 2, 2), out_indices=(0, 1, 2))


def images(count=2, size=(61, 90)):
    return torch.randn(count, 3, *size, dtype=torch.double)


def swin(norm='LN', kind='SwinTransformer', **kwargs):
    return as_trained(MODELS.build(dict(type=kind, **SMALL, norm_cfg=dict(type=norm), **kwargs)).double())


def timm_swin():
    small = dict(embed_dim=8, depths=(1, 1, 2, 1), num_heads=(1, 1, 2, 2))
    return as_trained(timm.create_model('swin_tiny_patch4_window7_224', features_only=True, **small).double())


@pytest.mark.parametrize('name', ['SwinTransformer', 'timm', 'detector'])
def test_converted_model_computes_the_same_at_gamma_1(name, small_detector):
    builders = dict(SwinTransformer=swin, timm=timm_swin)
    model = small_detector(norm_cfg=dict(type='LN')).double() if name == 'detector' else builders[name]()
    x = images(size=(224, 224))
    num_norms = sum(isinstance(m, nn.LayerNorm) for m in model.modules())
    converted = slab_det.convert_norms(model)
    with torch.no_grad():
        expected, outputs = (getattr(m, 'extract_feat', m)(x) for m in (model, converted))
    for output, reference in zip(outputs, expected, strict=True):
        # mmdet's blocks became slab_det's, which round differently.
        assert relative_difference([output], [reference]) <= (1e-12 if name == 'SwinTransformer' else 0)
    assert len(converted.conversion_report.converted) == num_norms > 0 and not converted.conversion_report.kept
    assert sum(isinstance(m, PRepBN) for m in converted.modules()) == num_norms
    assert not [m for m in model.modules() if isinstance(m, PRepBN)], 'the model given is left alone'


def test_eps_and_weights_are_kept_and_options_win():
    model = nn.Sequential(nn.LayerNorm(4, eps=1e-3), nn.LayerNorm(4, elementwise_affine=False))
    randomize(model, 1)
    model[0].weight.requires_grad_(False)
    converted = slab_det.convert_norms(model, dict(type='PRepBN', eps=1e-4))
    assert (converted[0].ln.eps, converted[0].repbn.eps) == (1e-3, 1e-4)
    assert torch.equal(converted[0].ln.weight, model[0].weight) and not converted[0].ln.weight.requires_grad
    assert converted[1].ln.eps == 1e-5 and torch.equal(converted[1].ln.weight, torch.ones(4))
    for kind in ('mmengine.PRepBN', PRepBN):
        assert slab_det.convert_norms(model, dict(type=kind))[0].ln.eps == 1e-3
    token_bn = slab_det.convert_norms(model, dict(type='TokenBN'))[0]
    assert isinstance(token_bn, TokenBN) and torch.equal(token_bn.weight, model[0].weight)
    assert slab_det.convert_norms(model, inplace=True) is model


class CenteredNorm(nn.LayerNorm):
    """A subclass of LayerNorm that computes another function."""

    def forward(self, x):
        return super().forward(x) - x.mean(-2, keepdim=True)


def test_skipped_and_unconvertible_norms_are_reported():
    model = nn.ModuleDict(
        dict(
            a=nn.LayerNorm(4),
            b=nn.Sequential(nn.LayerNorm(4)),
            c=nn.LayerNorm((2, 4)),
            e=PRepBN(4),
            g=CenteredNorm(4),
            i=nn.TransformerEncoderLayer(4, 2, 8),
            j=nn.LayerNorm(4),
        )
    )
    model['j'].register_forward_hook(lambda module, args, output: 2 * output)
    converted = slab_det.convert_norms(model, skip=['b'])
    report = converted.conversion_report
    assert report.converted == ['a']
    assert {name: reason.split()[0] for name, reason in report.kept.items()} == {
        'b.0': 'skipped',
        'c': 'it',
        'g': 'CenteredNorm',
        'i.norm1': 'the',
        'i.norm2': 'the',
        'j': 'it',
    }
    assert report.kept['j'] == 'it has forward hooks'
    assert all(type(converted[name]) is type(model[name]) for name in 'cegj')
    assert '1 norms converted, 6 kept' in str(report)


@pytest.mark.parametrize('norm', [timm.layers.LayerNorm(4), timm.layers.LayerNormFp32(4), LayerNormNoBias(4)])
def test_norms_of_timm_over_the_last_dimension_are_converted(norm):
    model = as_trained(nn.Sequential(norm).double(), 4)
    x = torch.randn(2, 3, 4, dtype=torch.double)
    with torch.no_grad():
        # LayerNormFp32 rounds to what its name says.
        torch.testing.assert_close(slab_det.convert_norms(model)(x), model(x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize('gamma', [0.5, 0.0])
def test_frozen_norms_are_frozen_whole(gamma):
    """DDP waits for the gradient of each parameter that asks for one."""
    model = slab_det.convert_norms(swin(kind='SLABSwin', frozen_stages=1))
    frozen = {
        name
        for name, norm in model.named_modules()
        if isinstance(norm, PRepBN) and not any(parameter.requires_grad for parameter in norm.parameters())
    }
    assert frozen == {
        'patch_embed.norm',
        'norm0',
        'stages.0.downsample.norm',
        *(f'stages.0.blocks.{i}.norm{j}' for i in range(2) for j in (1, 2)),
    }
    set_gamma(model, gamma)
    # Frozen stages must stay in eval mode, and their outputs must take no gradient.
    sum(output.square().sum() for output in model.train()(images())).backward()
    without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not [name for name in without if gamma > 0 or '.ln.' not in name]


def test_a_failed_conversion_in_place_leaves_the_model():
    norm = nn.LayerNorm(3)
    model = nn.Sequential(nn.Sequential(norm, nn.LayerNorm(3)), norm)
    before = dict(model.named_modules(remove_duplicate=False))
    with pytest.raises(ConversionError, match='no offline norm'):
        slab_det.convert_norms(model, dict(type='GN', num_groups=1), inplace=True)
    after = dict(model.named_modules(remove_duplicate=False))
    assert before.keys() == after.keys() and all(before[name] is after[name] for name in before)
    assert not hasattr(model, 'conversion_report')


def test_converted_model_refuses_weights_of_layernorms_before_it_copies_any():
    cfg = dict(type='SwinTransformer', embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2))
    model, other = (randomize(MODELS.build(cfg), seed) for seed in (0, 1))
    converted = slab_det.convert_norms(model)
    before = {key: value.clone() for key, value in converted.state_dict().items()}
    with pytest.raises(RuntimeError, match=r'patch_embed\.norm: the weights .* belong to another norm than PRepBN'):
        converted.load_state_dict(other.state_dict())
    assert not differing(converted, before)
    converted.load_state_dict(slab_det.convert_norms(other).state_dict())


def test_wrong_uses_are_refused():
    deployed = slab_det.deploy(swin('LN').float())
    for norms, message in (
        (nn.Linear(2, 2), 'no LayerNorm'),
        (nn.LayerNorm(2), 'whole model'),
        (deployed, 'deployed.*; convert the model that was deployed'),
    ):
        with pytest.raises(ConversionError, match=message):
            slab_det.convert_norms(norms)
