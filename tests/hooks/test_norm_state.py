"""NormStateHook in real runs of a small Mask R-CNN on generated images."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from mmengine.hooks import Hook, LoggerHook
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner

from slab_det.hooks.norm_state import is_logged
from slab_det.norms import named_offline_norms, named_quadratic_norms

NORM = dict(type='UN', warmup_iters=2, window_size=2)


class Watch(Hook):
    """Looks at the first output norm before the first iteration, and stops after a given one."""

    priority = 'LOWEST'

    def __init__(self, stop_after=None):
        self.stop_after = stop_after

    def before_run(self, runner):
        # As the weights of a pretrained detector may have it.
        runner.model.backbone.norm0.iteration.fill_(9)

    def before_train(self, runner):
        norm = runner.model.backbone.norm0
        self.iteration, self.running_var = int(norm.iteration), norm.running_var.clone()
        self.is_clear = not any(buffer.any() for name, buffer in norm.named_buffers() if name != 'running_var')

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.stop_after:
            raise KeyboardInterrupt


class Overflow(Hook):
    """Makes the images of some iterations infinite."""

    def __init__(self, iterations):
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
    """A function: trains, and returns the runner, its log and its records of training iterations."""

    def train(name, hook, norm_cfg=NORM, max_iters=2, interval=4, skip_steps=False, **changes):
        cfg = small_run_cfg(name, max_iters, norm_cfg=norm_cfg)
        if skip_steps:
            cfg.optim_wrapper.type = StepWhereFinite
        cfg.custom_hooks = []
        cfg.default_hooks.logger.interval = interval
        cfg.update(val_dataloader=None, val_cfg=None, val_evaluator=None, randomness=dict(seed=0), **changes)
        # There is one visualizer of a name in a process, and it writes into the folder of its first run.
        cfg.experiment_name = cfg.visualizer.name = f'{cfg.experiment_name}-{max_iters}-{sorted(changes)}'
        runner = Runner.from_cfg(cfg)
        runner.register_hook(hook)
        try:
            runner.train()
        except KeyboardInterrupt:
            pass
        folder = Path(runner.work_dir, runner.timestamp)
        scalars = folder / 'vis_data/scalars.json'
        records = [json.loads(line) for line in scalars.read_text().splitlines()] if scalars.exists() else []
        return runner, next(folder.glob('*.log')).read_text(), [record for record in records if 'loss' in record]

    return train


def test_a_resumed_run_ends_as_one_without_interruption_and_logs_the_filter(run):
    start = Watch()
    whole, log, _ = run('whole', start, max_iters=6, interval=3)
    assert start.is_clear
    run('parts', Watch(stop_after=4), max_iters=6)
    start = Watch()
    resumed, _, _ = run('parts', start, max_iters=6, resume=True)
    assert start.iteration == 4
    state = resumed.model.state_dict()
    for key, value in whole.model.state_dict().items():
        assert torch.equal(state[key], value), key
    norms = list(named_quadratic_norms(whole.model).values())
    assert {int(norm.iteration) for norm in norms} == {6}
    # LoggerHook logs iterations 3 and 6; the hook reads the counters then and at no other time.
    assert len(re.findall(r'Iter\(train\).* un_filtered: \d', log)) == 2
    history, _ = whole.message_hub.get_scalar('train/un_filtered').data
    # Four iterations come after the warm-up.
    assert len(history) == 2 and 0 < history[-1] < 1
    assert history[-1] == pytest.approx(sum(int(norm.num_filtered) / 4 for norm in norms) / len(norms), abs=1e-6)


def test_fine_tuning_starts_with_a_warm_up_and_the_loaded_variance(run):
    pretrained, _, _ = run('pretrained', Watch())
    loaded = pretrained.model.backbone.norm0.running_var
    start = Watch()
    run('tuned', start, load_from=str(Path(pretrained.work_dir) / 'iter_2.pth'))
    assert start.is_clear
    assert torch.equal(start.running_var, loaded) and not torch.equal(loaded, torch.ones_like(loaded))


def test_resume_without_a_checkpoint_to_resume_from_starts_with_a_warm_up(run):
    start = Watch()
    runner, _, _ = run('new', start, dict(type='PowerNorm'), max_iters=1, resume=True)
    assert start.is_clear and runner.model.backbone.norm0.iteration == 1
    assert 'train/un_filtered' not in runner.message_hub.log_scalars, 'it has no filter'


@pytest.mark.parametrize('norm', ['PRepBN', 'UN'])
def test_skipped_batches_are_counted_and_each_is_warned_of(run, norm):
    def warnings(log):
        return [line for line in log.splitlines() if 'NaN or infinite' in line]

    options = dict(norm_cfg=dict(type=norm), interval=2, skip_steps=True)
    runner, log, records = run('run', Overflow((3, 6)), max_iters=8, **options)
    names = [name for name, _ in named_offline_norms(runner.model)]
    assert len(warnings(log)) == 2
    for warning, iteration in zip(warnings(log), (4, 8), strict=True):
        assert f'iteration {iteration} {len(names)} of {len(names)} norms' in warning
        assert f'{names[0]} 1, at most 1 since' in warning
    assert [record.get('norm_skipped') for record in records] == [None, 1, 1, 2]
    # A resumed run counts anew, and a sound one is silent.
    _, log, records = run('run', Overflow(()), max_iters=10, resume=True, **options)
    assert not warnings(log) and [record.get('norm_skipped') for record in records] == [None]


@pytest.mark.parametrize('ignore_last', [True, False])
@pytest.mark.parametrize('interval', [3, 10])
def test_counters_are_read_exactly_where_mmengine_logs(tmp_path, interval, ignore_last):
    hook = LoggerHook(interval=interval, ignore_last=ignore_last, interval_exp_name=100)
    hook.json_log_path = tmp_path / 'log.json'
    for batch_idx in range(7):
        runner = Mock(iter=batch_idx, train_dataloader=range(7), hooks=[SimpleNamespace(), hook])
        runner.log_processor.get_log_after_iter.return_value = {}, ''
        hook.after_train_iter(runner, batch_idx)
        assert is_logged(runner, batch_idx) == runner.log_processor.get_log_after_iter.called, batch_idx
