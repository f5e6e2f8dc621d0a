"""NormStateHook in real runs of a small Mask R-CNN on generated images."""

from pathlib import Path

import pytest
import torch
from conftest import StopAfter
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner

from slab_det.hooks import norm_state
from slab_det.norms import OfflineNorm, named_offline_norms

NORM = dict(type='UN', warmup_iters=2, window_size=2)


class Start(Hook):
    """Looks at the first output norm before the first iteration."""

    priority = 'LOWEST'

    def before_run(self, runner):
        # As the weights of a pretrained detector may have it.
        runner.model.backbone.norm0.iteration.fill_(9)

    def before_train(self, runner):
        self.state = {name: buffer.clone() for name, buffer in runner.model.backbone.norm0.named_buffers()}
        self.is_clear = not any(buffer.any() for name, buffer in self.state.items() if name != 'running_var')


class Overflow(Hook):
    """Makes the images of some iterations infinite."""

    def __init__(self, *iterations):
        self.iterations = iterations

    def before_train(self, runner):
        runner.model.backbone.register_forward_pre_hook(
            lambda module, args: (args[0] * float('inf'),) if runner.iter in self.iterations else None
        )


class StepWhereFinite(OptimWrapper):
    """Leaves out the step of an infinite batch, as a gradient scaler does; weights would not survive it."""

    def step(self, **kwargs):
        gradients = [p.grad for group in self.param_groups for p in group['params'] if p.grad is not None]
        if all(gradient.isfinite().all() for gradient in gradients):
            super().step(**kwargs)


@pytest.fixture
def run(small_run_cfg):
    """A function: trains with some hooks, and returns the runner and the warnings of bad batches."""

    def train(name, *hooks, norm_cfg=NORM, max_iters=2, **changes):
        cfg = small_run_cfg(name, max_iters, norm_cfg=norm_cfg)
        cfg.optim_wrapper.type = StepWhereFinite
        cfg.custom_hooks = []
        cfg.update(val_dataloader=None, val_cfg=None, val_evaluator=None, randomness=dict(seed=0), **changes)
        cfg.experiment_name += f'-{max_iters}-{sorted(changes)}'
        runner = Runner.from_cfg(cfg)
        for hook in hooks:
            runner.register_hook(hook)
        try:
            runner.train()
        except KeyboardInterrupt:
            pass
        log = next(Path(runner.work_dir, runner.timestamp).glob('*.log')).read_text()
        return runner, [line for line in log.splitlines() if 'NaN or infinite' in line]

    return train


def test_fine_tuning_starts_with_a_warm_up_and_a_resumed_run_does_not(run):
    start = Start()
    whole, _ = run('whole', start, max_iters=4)
    assert start.is_clear
    run('parts', StopAfter(3), max_iters=4)
    start = Start()
    resumed, _ = run('parts', start, max_iters=4, resume=True)
    assert start.state['iteration'] == 2
    state = resumed.model.state_dict()
    assert not [key for key, value in whole.model.state_dict().items() if not torch.equal(state[key], value)]
    start = Start()
    run('tuned', start, max_iters=1, load_from=str(Path(whole.work_dir) / 'iter_4.pth'))
    loaded = whole.model.backbone.norm0.running_var
    assert start.is_clear and torch.equal(start.state['running_var'], loaded) and (loaded != 1).any()


def test_resume_without_a_checkpoint_to_resume_from_starts_with_a_warm_up(run):
    start = Start()
    run('new', start, norm_cfg=dict(type='PowerNorm'), max_iters=1, resume=True)
    assert start.is_clear


@pytest.mark.parametrize('norm', ['PRepBN', 'UN'])
def test_skipped_batches_are_warned_of(run, monkeypatch, norm):
    monkeypatch.setattr(norm_state, 'INTERVAL', 2)
    runner, warnings = run('run', Overflow(1, 4, 6), norm_cfg=dict(type=norm), max_iters=7)
    names = [name for name, _ in named_offline_norms(runner.model)]
    assert len(warnings) == 3
    for warning, iteration, count in zip(warnings, (2, 6, 7), (1, 2, 3), strict=True):
        assert f'iteration {iteration} {len(names)} of {len(names)} norms left up to {count} batches' in warning
        assert names[0] in warning
    assert all(norm.num_skipped == 3 for norm in runner.model.modules() if isinstance(norm, OfflineNorm))
