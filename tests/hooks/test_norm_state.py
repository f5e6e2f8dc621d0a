"""NormStateHook: averages are reset for a new run; missing hooks are warned of."""

import re

import pytest
import torch
from conftest import StopAfter, differing
from mmengine.hooks import Hook
from regression import Regression, train
from torch import nn

from slab_det.hooks import NormStateHook, ProgressiveNormHook
from slab_det.norms import UN, PRepBN, TokenBN


def small_un(num_features):
    return UN(num_features, warmup_iters=2, window_size=2)


class Start(Hook):
    """Looks at the first norm before the first iteration."""

    priority = 'LOWEST'

    def before_run(self, runner):
        # Pretrained weights may bring any state.
        runner.model.norms[0].iteration.fill_(9)

    def before_train(self, runner):
        self.state = {name: buffer.clone() for name, buffer in runner.model.norms[0].named_buffers()}
        self.is_clear = not any(buffer.any() for name, buffer in self.state.items() if name != 'running_var')


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
    """norm_eval freezes statistics that count as loaded."""
    for stop, resume in ((3, False), (5, True), (None, True)):
        hooks = [NormStateHook(), StopAfter(stop)]
        model = train(tmp_path, hooks, lambda: Regression(norm), resume=resume).model
        assert not any(module.statistics_loaded for module in model.norms)


@pytest.mark.parametrize(
    ('norm', 'hooks', 'missing'),
    [
        (PRepBN, [], {'ProgressiveNormHook', 'RecalibrateFuseHook'}),
        (PRepBN, [ProgressiveNormHook(total=0.5)], {'RecalibrateFuseHook'}),
        (small_un, [], {'RecalibrateFuseHook'}),
        (nn.LayerNorm, [], set()),
    ],
)
def test_missing_hooks_are_warned_of_before_training(tmp_path, norm, hooks, missing):
    train(tmp_path, [NormStateHook(), *hooks], lambda: Regression(norm), max_iters=2)
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert set(re.findall('WARNING - this run has no ([A-Za-z]*), so 2 norms', log)) == missing
