"""Recalibration finds the statistics that inference sees; on several processes: tests/distributed."""

import copy
import math

import pytest
import torch
from conftest import SLA, SMALL_SWIN, as_trained, differing
from mmdet.registry import MODELS
from mmengine.dataset import InfiniteSampler
from torch import nn
from torch.utils.data import DataLoader

import slab_det
from slab_det.norms import TokenBN, named_offline_norms
from slab_det.recalibration import RecalibrationError
from slab_det.recalibration.fixed_point import JUMP, copy_statistics, largest_change

SIZES = [(1, 3, 64, 80), (2, 3, 48, 40), (1, 3, 90, 33)]


def build_backbone(**options):
    return as_trained(MODELS.build({**SMALL_SWIN, 'drop_path_rate': 0.5, **options}).double())


def build_batches(ratio=1):
    """Batches of which each is ``ratio`` times as large as the one before."""
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(shape, generator=generator).double() * (i + 1) + i for i, shape in enumerate(SIZES)]
    return [batch * ratio**i for i, batch in enumerate(batches)]


def recalibrate(model, batches, **options):
    return slab_det.recalibrate(model, batches, progress=False, **options)


def changed(model, before):
    """The last part of the names of parameters and buffers that changed."""
    return {key.rpartition('.')[2] for key in differing(model, before)}


def inputs_of_norms(model, batches):
    """The tokens that each norm sees at inference, (N, C) per norm."""
    seen = {name: [] for name, _ in named_offline_norms(model)}
    handles = [
        norm.register_forward_pre_hook(lambda _, args, s=seen[name]: s.append(args[0].flatten(0, -2)))
        for name, norm in named_offline_norms(model)
    ]
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(parts) for name, parts in seen.items()}


@pytest.mark.parametrize(
    'options',
    [{}, SLA, dict(norm_cfg=dict(type='UN'))],
    ids=['softmax', 'sla', 'UN'],
)
def test_statistics_match_the_inputs_at_inference_and_nothing_else_changes(options):
    model, batches = build_backbone(**options), build_batches()
    before = copy.deepcopy(model.state_dict())
    report = recalibrate(model, batches, max_passes=60, tol=1e-10)
    assert report.converged and report.num_batches == 3 and len(report.residuals) > 1, report
    has_mean = 'norm_cfg' not in options
    assert changed(model, before) == ({'running_mean', 'running_var'} if has_mean else {'running_var'})
    for name, tokens in inputs_of_norms(model, batches).items():
        mean, var = model.get_submodule(name).statistics()
        assert tokens.mean(0).abs().max() > 0.05, 'a mean that matters'
        expected = (tokens.mean(0), tokens.var(0, correction=0)) if has_mean else (mean * 0, tokens.square().mean(0))
        torch.testing.assert_close(mean, expected[0], rtol=1e-8, atol=1e-8, msg=name)
        torch.testing.assert_close(var, expected[1], rtol=1e-8, atol=1e-8, msg=name)


@pytest.mark.parametrize('norm', ['PRepBN', 'UN'])
def test_as_many_passes_as_norms_find_the_fixed_point_of_unrelated_images(norm):
    model, batches = build_backbone(depths=(2, 2, 2, 2), norm_cfg=dict(type=norm)), build_batches(10)
    settled = copy.deepcopy(model)
    every_pass = recalibrate(settled, batches, tol=0)
    # Exactly 0: in the last two passes every norm has the same inputs.
    assert every_pass.converged and every_pass.residuals[-1] == 0 and len(every_pass.residuals) <= every_pass.num_norms
    norms = dict(named_offline_norms(model))
    before, after = copy_statistics(norms), copy_statistics(dict(named_offline_norms(settled)))
    report = recalibrate(model, batches)
    assert report.converged and len(report.residuals) < len(every_pass.residuals)
    left, moved = (max(largest_change(norm, other[name]) for name, norm in norms.items()) for other in (after, before))
    assert left < report.tol < moved


def test_errors_do_not_grow_from_norm_to_norm():
    batches = [batch.float() for batch in build_batches(10)]
    model = build_backbone(depths=(2, 2, 8, 2), norm_cfg=dict(type='TokenBN'), ffn_norm='pre_act').float()
    report = recalibrate(model, batches)
    assert report.converged and max(report.residuals) < 1000, report


class Chain(nn.Module):
    """Norms and linear layers in turn; the norms can be registered in another order than they are called in."""

    def __init__(self, reverse, depth=10, channels=6):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        norms = [TokenBN(channels) for _ in range(depth)]
        for i, norm in reversed([*enumerate(norms)]) if reverse else enumerate(norms):
            self.add_module(f'norm{i}', norm)
        self.weights = [torch.randn(channels, channels, generator=generator).double() for _ in norms]

    def forward(self, x):
        for i, weight in enumerate(self.weights):
            x = torch.expm1(getattr(self, f'norm{i}')(x).clamp(max=8)) @ weight
        return x


def test_norms_are_final_in_the_order_of_their_calls():
    batches = [torch.randn(1, 60, 6, generator=torch.Generator().manual_seed(i)).double() * 10**i for i in range(3)]
    reports = [recalibrate(Chain(reverse).double().eval(), batches, tol=0) for reverse in (False, True)]
    assert reports[0].residuals == reports[1].residuals and max(reports[0].residuals) > JUMP
    for report in reports:
        assert report.converged and report.residuals[-1] == 0 and len(report.residuals) <= report.num_norms, report


def test_old_statistics_gamma_and_modes_do_not_matter_and_stay():
    batches, results = build_batches(), []
    for factor in (1.0, 100.0):
        model = build_backbone()
        slab_det.set_gamma(model, 0.5)
        for _, norm in named_offline_norms(model):
            norm.set_statistics(*(values * factor for values in norm.statistics()))
        if factor == 1.0:
            model.train()
            model.stages[0].eval()
        before, flags = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
        recalibrate(model, batches, max_passes=3, tol=0)
        assert changed(model, before) == {'running_mean', 'running_var'}
        assert [module.training for module in model.modules()] == flags
        results.append(model.state_dict())
    # Drop-path of the model in training mode is off.
    assert not differing(*results)


# The variance at 1e25 fits the float64 moments, not the float32 buffers. The damaged layer feeds the next norm.
@pytest.mark.parametrize('bad', [math.inf, 1e25])
def test_non_finite_values_are_refused_with_the_layers_name_and_keep_the_old_statistics(bad):
    model = build_backbone(norm_cfg=dict(type='TokenBN')).float()
    with torch.no_grad():
        model.stages[1].blocks[0].ffn.layers[1].weight[2] *= bad
    before = copy.deepcopy(model.state_dict())
    message = r'^stages\.1\.blocks\.1\.norm1: .* NaN or beyond torch\.float32; lower the learning rate'
    with pytest.raises(RecalibrationError, match=message):
        recalibrate(model, [batch.float() for batch in build_batches()])
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize('endless', [True, False])
def test_all_passes_over_a_loader_that_shuffles_see_the_same_images(endless):
    images = list(torch.randn(7, 3, 48, 40, generator=torch.Generator().manual_seed(0)).double())
    order = dict(sampler=InfiniteSampler(images, seed=0)) if endless else dict(shuffle=True, drop_last=True)
    report = recalibrate(build_backbone(), DataLoader(images, batch_size=2, **order), max_passes=60, tol=1e-10)
    assert report.converged and report.num_batches == (4 if endless else 3), report


def test_unusable_batches_and_fused_models_are_refused():
    model = build_backbone()
    for batches, message in (([], 'no batch'), (iter([torch.zeros(1, 3, 8, 8)]), 'not an iterator')):
        with pytest.raises(RecalibrationError, match=message):
            recalibrate(model, batches)
    with pytest.raises(RecalibrationError, match='before fusing'):
        recalibrate(slab_det.fuse(model), build_batches())
