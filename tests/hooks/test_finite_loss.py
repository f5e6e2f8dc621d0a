"""FiniteLossHook: a loss of NaN ends the run, and the last checkpoint with finite weights stays."""

import math

import pytest
import torch
from mmengine.hooks import CheckpointHook, Hook
from mmengine.optim.optimizer import amp_optimizer_wrapper
from mmengine.runner import Runner
from regression import Regression, train

from slab_det.common.errors import TrainingError
from slab_det.hooks import FiniteLossHook
from slab_det.hooks.finite_loss import MOST_SKIPPED


class Spoiled(Regression):
    """From iteration ``first`` to ``last``, ``spoil`` makes the loss or its gradient NaN or infinite."""

    def __init__(self, spoil, first=4, last=math.inf):
        super().__init__()
        self.spoil, self.first, self.last, self.count = spoil, first, last, 0

    def forward(self, x, target, mode='tensor'):
        result = super().forward(x, target, mode)
        if mode == 'loss':
            self.count += 1
            if self.first <= self.count <= self.last:
                result['loss_box'] = self.spoil(self.head.bias.sum())
        return result


class KeepOne(Hook):
    """Lets the run keep one checkpoint, as a disk that is nearly full does."""

    def before_train(self, runner):
        next(hook for hook in runner.hooks if isinstance(hook, CheckpointHook)).max_keep_ckpts = 1


SPOILED = {
    'NaN': (lambda x: x * math.nan, r'^iteration 4: the loss is not finite \(loss_box nan\)'),
    'infinite': (lambda x: x * 0 + math.inf, r'^iteration 4: the loss is not finite \(loss_box inf\)'),
    # The loss is finite, and the root's gradient at 0 times 0 is not.
    'gradient': (
        lambda x: (x * 0).abs().sqrt(),
        r'^iteration 4: \d+ weights are not finite \(.*no checkpoint is saved',
    ),
}


@pytest.mark.parametrize('spoil', SPOILED)
def test_a_run_of_nan_ends_and_keeps_its_last_good_checkpoint(tmp_path, spoil):
    spoil, message = SPOILED[spoil]
    with pytest.raises(TrainingError, match=message) as error:
        train(tmp_path, [FiniteLossHook(), KeepOne()], lambda: Spoiled(spoil))
    (left,) = tmp_path.glob('iter_*.pth')
    assert left.name == 'iter_3.pth' and str(left) in str(error.value) and 'load_from=FILE' in str(error.value)
    assert all(value.isfinite().all() for value in torch.load(left, weights_only=False)['state_dict'].values())
    assert (tmp_path / 'last_checkpoint').read_text() == str(left)


def test_without_a_checkpoint_the_message_names_none(tmp_path):
    with pytest.raises(TrainingError, match='damaged boxes and images; then start again$'):
        train(tmp_path, [FiniteLossHook()], lambda: Spoiled(SPOILED['NaN'][0], first=1))


@pytest.mark.parametrize(('last', 'ends'), [(3 + MOST_SKIPPED - 1, False), (3 + MOST_SKIPPED, True)])
def test_a_loss_scaler_skips_updates_until_too_many_follow_each_other(tmp_path, monkeypatch, last, ends):
    """With PyTorch's real scaler, on the CPU; mmengine's wrapper refuses to be built there."""
    monkeypatch.setattr(amp_optimizer_wrapper, 'is_cuda_available', lambda: True)
    monkeypatch.setattr(amp_optimizer_wrapper, 'GradScaler', lambda: torch.amp.GradScaler('cpu'))
    build = Runner.build_optim_wrapper

    def build_amp(runner, cfg):
        return build(runner, {**cfg, 'type': 'AmpOptimWrapper'})

    monkeypatch.setattr(Runner, 'build_optim_wrapper', build_amp)

    def run():
        return train(
            tmp_path,
            [FiniteLossHook()],
            lambda: Spoiled(SPOILED['infinite'][0], last=last),
            max_iters=last + 4,
            interval=last + 4,
        )

    if ends:
        with pytest.raises(TrainingError, match=rf'^iteration {last}: .*, in {MOST_SKIPPED} iterations in a row'):
            run()
    else:
        runner = run()
        assert all(value.isfinite().all() for value in runner.model.parameters())
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert log.count('the loss scaler skips the update') == 1 and 'iteration 4: the loss is not finite' in log
