"""NormStateHook: averages start with a run; broken statistics and missing hooks are warned of."""

import pytest
import torch
from conftest import StopAfter, differing
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.registry import OPTIM_WRAPPERS
from regression import Regression, train
from torch import nn

from slab_det.hooks import NormStateHook, ProgressiveNormHook, RecalibrateFuseHook
from slab_det.norms import UN, PowerNorm, PRepBN, TokenBN


def small_un(num_features):
    return UN(num_features, warmup_iters=2, window_size=2)


class Start(Hook):
    """Looks at the first norm before the first iteration."""

    priority = 'LOWEST'

    def before_run(self, runner):
        # As the weights of a pretrained model may have it.
        runner.model.norms[0].iteration.fill_(9)

    def before_train(self, runner):
        self.state = {name: buffer.clone() for name, buffer in runner.model.norms[0].named_buffers()}
        self.is_clear = not any(buffer.any() for name, buffer in self.state.items() if name != 'running_var')


class Overflow(Hook):
    """Makes the input of some iterations infinite."""

    def __init__(self, *iterations):
        self.iterations = iterations

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter in self.iterations:
            data_batch[0].fill_(float('inf'))


class StepWhereFinite(OptimWrapper):
    """Leaves out the step of an infinite batch, as a gradient scaler does; weights would not survive it."""

    def step(self, **kwargs):
        gradients = [p.grad for group in self.param_groups for p in group['params'] if p.grad is not None]
        if all(gradient.isfinite().all() for gradient in gradients):
            super().step(**kwargs)


def test_fine_tuning_starts_with_a_warm_up_and_a_resumed_run_does_not(tmp_path):
    def run(name, hook, **options):
        start = Start()
        runner = train(tmp_path / name, [NormStateHook(), start, hook], lambda: Regression(small_un), **options)
        return runner.model, start

    whole, start = run('whole', StopAfter(None))
    assert start.is_clear
    run('parts', StopAfter(3))
    resumed, start = run('parts', StopAfter(None), resume=True)
    assert start.state['iteration'] == 3
    assert not differing(resumed, whole)
    _, start = run('tuned', StopAfter(1), load_from=str(tmp_path / 'whole/iter_10.pth'))
    loaded = whole.norms[0].running_var
    assert start.is_clear and torch.equal(start.state['running_var'], loaded) and (loaded != 1).any()


@pytest.mark.parametrize('norm', [TokenBN, PRepBN])
def test_a_resumed_run_leaves_its_own_statistics_live(tmp_path, norm):
    """norm_eval freezes those that count as loaded."""
    for stop, resume in ((3, False), (5, True), (None, True)):
        hooks = [NormStateHook(), StopAfter(stop)]
        model = train(tmp_path, hooks, lambda: Regression(norm), resume=resume).model
        assert not any(module.statistics_loaded for module in model.norms)


def test_resume_without_a_checkpoint_to_resume_from_starts_with_a_warm_up(tmp_path):
    start = Start()
    train(tmp_path, [NormStateHook(), start, StopAfter(1)], lambda: Regression(PowerNorm), resume=True)
    assert start.is_clear


@pytest.mark.parametrize('norm, warnings', [(PRepBN, 1), (small_un, 0)])
def test_statistics_that_are_not_finite_are_warned_of_at_validation(tmp_path, monkeypatch, norm, warnings):
    """Once, although every other iteration validates; norms without mean keep such batches out."""
    monkeypatch.setitem(OPTIM_WRAPPERS.module_dict, 'StepWhereFinite', StepWhereFinite)
    hooks = [NormStateHook(), Overflow(2)]
    train(tmp_path, hooks, lambda: Regression(norm), max_iters=6, optim_wrapper='StepWhereFinite', val=True)
    lines = [line for line in next(tmp_path.glob('*/*.log')).read_text().splitlines() if 'NaN or infinite' in line]
    assert len(lines) == warnings, lines
    assert all('2 of 2 norms' in line and 'norms.0 for one' in line and 'recalibration' in line for line in lines)


LOWERS, FUSES = ProgressiveNormHook(total=0.5), RecalibrateFuseHook()


@pytest.mark.parametrize(
    ('norm', 'hooks', 'missing'),
    [
        (PRepBN, [], ['ProgressiveNormHook', 'RecalibrateFuseHook']),
        (PRepBN, [LOWERS], ['RecalibrateFuseHook']),
        (PRepBN, [FUSES], ['ProgressiveNormHook']),
        (small_un, [], ['RecalibrateFuseHook']),
        (nn.LayerNorm, [], []),
    ],
)
def test_hooks_that_the_norms_need_are_missed_before_and_after_training(tmp_path, norm, hooks, missing):
    train(tmp_path, [NormStateHook(), *hooks], lambda: Regression(norm), max_iters=2)
    lines = next(tmp_path.glob('*/*.log')).read_text().splitlines()
    lines = [line for line in lines if 'this run has no' in line]
    expected = [(*when, hook) for when in (('WARNING', 0), ('ERROR', 2)) for hook in missing]
    assert len(lines) == len(expected), lines
    for line, (level, iteration, hook) in zip(lines, expected, strict=True):
        assert f' {level} - ' in line
        assert f'Iteration {iteration}: this run has no {hook}, so 2 norms (norms.0 for one)' in line
        assert 'custom_hooks of a config replaces the list of its _base_' in line
