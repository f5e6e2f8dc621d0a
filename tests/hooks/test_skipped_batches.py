"""SkippedBatchesHook in a real run in half precision, with an image that overflows."""

import json
from pathlib import Path

import pytest
from mmengine.hooks import Hook
from mmengine.runner import Runner

from slab_det.norms import named_offline_norms


class Overflow(Hook):
    """Makes the images of some iterations infinite."""

    def __init__(self, iterations):
        self.iterations = iterations

    def before_train(self, runner):
        runner.model.backbone.register_forward_pre_hook(
            lambda module, args: (args[0] * float('inf'),) if runner.iter in self.iterations else None
        )


@pytest.fixture
def run(small_run_cfg):
    """A function: trains, and returns the runner, its warnings and what it logged as norm_skipped."""

    def train(norm, iters, bad, resume=False):
        cfg = small_run_cfg('run', iters, norm_cfg=dict(type=norm))
        # The scaler takes the step back, which weights would not survive.
        cfg.optim_wrapper.update(type='AmpOptimWrapper', dtype='float16', loss_scale=dict(init_scale=256.0))
        cfg.custom_hooks = [dict(type='UnifiedNormHook')] if norm == 'UN' else []
        cfg.default_hooks.logger.interval = 2
        cfg.update(val_dataloader=None, val_cfg=None, val_evaluator=None, resume=resume)
        # There is one visualizer of a name in a process, and it writes into the folder of its first run.
        cfg.experiment_name = cfg.visualizer.name = f'{norm}-{iters}-{bad}-{resume}'
        runner = Runner.from_cfg(cfg)
        runner.register_hook(Overflow(bad))
        runner.train()
        folder = Path(runner.work_dir, runner.timestamp)
        warnings = [line for line in next(folder.glob('*.log')).read_text().splitlines() if 'NaN or infinite' in line]
        records = map(json.loads, (folder / 'vis_data/scalars.json').read_text().splitlines())
        return runner, warnings, [record.get('norm_skipped') for record in records if 'loss' in record]

    return train


@pytest.mark.parametrize('norm', ['PRepBN', 'UN'])
def test_batches_that_are_skipped_are_counted_and_warned_of_each_time(run, norm):
    runner, warnings, counts = run(norm, 8, bad=(3, 6))
    names = [name for name, _ in named_offline_norms(runner.model)]
    assert len(warnings) == 2
    for warning, iteration in zip(warnings, (4, 8), strict=True):
        assert f'iteration {iteration} {len(names)} of {len(names)} norms' in warning
        assert f'{names[0]} 1, at most 1 since' in warning
    assert counts == [None, 1, 1, 2]


def test_a_resumed_run_counts_anew_and_a_sound_one_is_silent(run):
    _, warnings, counts = run('PRepBN', 4, bad=())
    assert not warnings and counts == [None] * 2
    run('PRepBN', 6, bad=(4,), resume=True)
    _, warnings, counts = run('PRepBN', 8, bad=(), resume=True)
    assert not warnings and counts == [None]
