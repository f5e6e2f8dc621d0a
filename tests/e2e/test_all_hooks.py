"""Every hook and every way of saving memory in one run, interrupted where it hurts most."""

import pytest
import torch
from conftest import StopAfter
from mmengine.hooks import CheckpointHook, EMAHook, LoggerHook
from mmengine.runner import Runner

from slab_det.hooks import (
    CheckedLoadHook,
    ExactResumeHook,
    PoolStatisticsHook,
    ProgressiveNormHook,
    RecalibrateFuseHook,
)

MAX_ITERS = 8


@pytest.fixture
def train(small_run_cfg):
    """A function: one run, up to ``stop_after`` or to the end."""

    def run(name, stop_after=None, resume=False):
        cfg = small_run_cfg(name, MAX_ITERS, with_cp=True, drop_path_rate=0.3)
        cfg.train_dataloader.dataset.pipeline.insert(
            2, dict(type='RandomChoiceResize', scales=[(40, 40), (70, 90), (96, 120)], keep_ratio=False)
        )
        cfg.optim_wrapper.accumulative_counts = 3
        cfg.train_cfg.val_interval = 4
        cfg.default_hooks.checkpoint.interval = 1
        cfg.custom_hooks.append(dict(type='EMAHook', momentum=0.2))
        cfg.experiment_name += f'-{stop_after}-{resume}'
        cfg.resume = resume
        runner = Runner.from_cfg(cfg)
        if stop_after is not None:
            runner.register_hook(StopAfter(stop_after))
        try:
            runner.train()
        except KeyboardInterrupt:
            pass
        return runner

    return run


def last(runner, name=f'iter_{MAX_ITERS}.pth'):
    return torch.load(f'{runner.work_dir}/{name}', weights_only=False)


def differing(run, whole):
    """Keys of what a run left that are not to the last bit what ``whole`` left."""
    pairs = [(last(run)[kind], last(whole)[kind]) for kind in ('state_dict', 'ema_state_dict')]
    pairs.append((last(run, 'fused.pth')['state_dict'], last(whole, 'fused.pth')['state_dict']))
    assert all(found.keys() == expected.keys() for found, expected in pairs)
    return [key for found, expected in pairs for key, value in expected.items() if not torch.equal(found[key], value)]


def check_order(hooks):
    """Hooks of one run, as :mod:`slab_det.hooks` says what each needs."""
    at = {hook: hooks.index(hook) for hook in hooks}
    assert at[CheckedLoadHook] < at[EMAHook] < at[ProgressiveNormHook] < at[LoggerHook] < at[PoolStatisticsHook]
    assert at[ExactResumeHook] < at[PoolStatisticsHook] < at[RecalibrateFuseHook] < at[CheckpointHook]


def test_an_interrupted_run_ends_as_the_uninterrupted_one(train):
    whole = train('whole')
    check_order([type(hook) for hook in whole.hooks])
    # Between two updates, in the decay.
    train('cut', 5)
    assert not differing(train('cut', resume=True), whole)
    saved = {t: 'accumulated_gradients' in last(whole, f'iter_{t}.pth') for t in range(1, MAX_ITERS + 1)}
    # The last iteration updates whatever was accumulated.
    assert saved == {t: t % 3 != 0 and t != MAX_ITERS for t in saved}
