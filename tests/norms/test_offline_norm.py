"""Behaviour that all norms share."""

import copy
from collections import Counter

import pytest
import torch
from conftest import differing
from mmcv.cnn import build_norm_layer, fuse_conv_bn
from mmengine.model import revert_sync_batchnorm
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS
from norm_formulas import NORMS, C, formula, make_norm, tokens
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import slab_det


@pytest.mark.parametrize('kind', NORMS)
def test_evaluation_equals_the_formula_and_its_gradients(kind):
    norm = make_norm(kind).eval()
    mean, var = torch.rand(C).double(), torch.rand(C).double() + 1
    norm.set_statistics(mean, var)
    before = copy.deepcopy(norm)
    x = tokens(requires_grad=True)
    y, expected = norm(x), formula(norm, dict(norm.named_parameters()), x, mean, var)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    scale, shift = norm.inference_affine()
    torch.testing.assert_close(scale * x + shift, expected, rtol=1e-12, atol=1e-12)
    trained = [x, *(p for name, p in norm.named_parameters() if not name.startswith('ln.'))]
    for got, wanted in zip(*(torch.autograd.grad(z.sin().sum(), trained) for z in (y, expected)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)
    assert not differing(norm, before)


@pytest.mark.parametrize('kind', NORMS)
def test_calibrating_normalises_by_batch_and_keeps_all_state(kind):
    norm = make_norm(kind)
    before = copy.deepcopy(norm)
    norm.calibrating = True
    for training in (True, False):
        x = tokens(requires_grad=True)
        y = norm.train(training)(x)
        p = dict(norm.named_parameters())
        torch.testing.assert_close(y, formula(norm, p, x, x.mean((0, 1)), x.var((0, 1), correction=0)))
        y.sum().backward()
        assert not differing(norm, before)
    norm.calibrating = False
    norm.train()(x)
    assert differing(norm, before)


@pytest.mark.parametrize('kind', NORMS)
def test_training_never_waits_for_the_device(kind):
    """Fake tensors have no values: reading one, as .item() and a branch do, is an error."""
    with FakeTensorMode():
        norm = kind(C)
        for _ in range(3):
            x = torch.randn(2, 3, C, requires_grad=True)
            (checkpoint(norm, x, use_reentrant=False) + norm(x)).sum().backward()


@pytest.mark.parametrize('kind', NORMS)
def test_norms_build_in_every_scope_and_check_channels(kind):
    for scope in ({}, dict(_scope_='mmdet'), dict(_scope_='mmengine')):
        assert type(MODELS.build(dict(type=kind.__name__, num_features=C, **scope))) is kind
    norm = build_norm_layer(dict(type=kind.__name__, momentum=0.2), C)[1]
    assert type(norm) is kind and norm.num_features == C and norm.eps == 1e-5
    with pytest.raises(ValueError, match=rf'{C}.*channels last'):
        norm(torch.zeros(2, C + 1, 3))


@pytest.mark.parametrize('kind', NORMS)
def test_norm_decay_mult_applies_and_batch_norm_tools_skip_norms(kind):
    """mmdet's RTMDet configs set norm_decay_mult. Tools that freeze, sync or fuse BatchNorm must skip our norms."""
    model = nn.Sequential(nn.Linear(C, C), kind(C))
    cfg = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1, weight_decay=0.5))
    wrapper = build_optim_wrapper(model, dict(cfg, paramwise_cfg=dict(norm_decay_mult=0, bypass_duplicate=True)))
    decays = {id(p): group['weight_decay'] for group in wrapper.param_groups for p in group['params']}
    found = {name: decays[id(parameter)] for name, parameter in model.named_parameters()}
    assert found == {name: 0.5 if name.startswith('0.') else 0 for name in found}
    assert not any(
        isinstance(module, (_BatchNorm, nn.LayerNorm)) for module in model.modules() if type(module) in NORMS
    )
    kinds = [type(module) for module in model.modules()]
    for convert in (nn.SyncBatchNorm.convert_sync_batchnorm, fuse_conv_bn, revert_sync_batchnorm):
        assert [type(module) for module in convert(copy.deepcopy(model)).modules()] == kinds
    for module in model.modules():
        if hasattr(module, 'reset_parameters'):
            module.reset_parameters()


# Operators that compute nothing: they change how a tensor is seen, or give it memory.
FREE = {
    *('view', 'view_as', 'reshape', 'permute', 'transpose', 'as_strided', 'expand', 'detach', 'select', 'slice'),
    *('unsqueeze', 'flatten', 'unflatten', 'unbind', 'chunk', 'split', 'empty', 'empty_like', 'empty_strided'),
}


def count_launches(model, gamma):
    """Counts the operators that compute in a forward and backward, without the operators that these call.

    On a GPU each launches one kernel or a few.
    """
    slab_det.set_gamma(model, gamma)
    x = torch.randn(2, 7, C).requires_grad_()
    # UN filters from its fifth iteration on.
    for _ in range(6):
        model.zero_grad()
        x.grad = None
        with profile(activities=[ProfilerActivity.CPU]) as recorder:
            model(x).sum().backward()

    def is_part(event):
        parent = event.cpu_parent
        return parent is not None and (parent.name.startswith('aten::') or is_part(parent))

    operators = [event for event in recorder.events() if event.name.startswith('aten::') and not is_part(event)]
    # A cast to the dtype that a tensor has already computes nothing.
    names = [event.name[6:] for event in operators if event.name != 'aten::to' or event.cpu_children]
    return Counter(name for name in names if name not in FREE)


@pytest.mark.parametrize(
    'cfg, gamma, bound',
    [
        (dict(type='LN'), 0.0, 2),
        (dict(type='TokenBN'), 0.0, 2),
        (dict(type='PRepBN'), 0.0, 7),
        (dict(type='PRepBN'), 0.5, 14),
        (dict(type='UN', warmup_iters=0), 0.0, 49),
        (dict(type='MABN', warmup_iters=0), 0.0, 29),
        (dict(type='PowerNorm', warmup_iters=0), 0.0, 26),
    ],
    ids=str,
)
def test_a_training_step_of_a_norm_launches_few_operators(cfg, gamma, bound):
    # Without the operators of the loss, which an identity has too.
    found = count_launches(build_norm_layer(cfg, C)[1], gamma) - count_launches(nn.Identity(), 0.0)
    assert found.total() <= bound, found
