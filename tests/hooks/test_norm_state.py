"""NormStateHook: averages are reset for a new run; missing hooks are warned of."""

import re

import pytest
import torch
from conftest import StopAfter
from mmengine.hooks import Hook
from regression import Regression, train
from torch import nn

from slab_det.hooks import NormStateHook, ProgressiveNormHook
from slab_det.norms import UN, PRepBN


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


def test_fine_tuning_starts_with_a_warm_up(tmp_path):
    """tests/hooks/test_resume.py has the resumed run, which does not."""
    whole, start = train(tmp_path / 'whole', [NormStateHook()], lambda: Regression(small_un)).model, Start()
    hooks, load_from = [NormStateHook(), start, StopAfter(1)], str(tmp_path / 'whole/iter_10.pth')
    train(tmp_path / 'tuned', hooks, lambda: Regression(small_un), load_from=load_from)
    loaded = whole.norms[0].running_var
    assert start.is_clear and torch.equal(start.state['running_var'], loaded) and (loaded != 1).any()


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
