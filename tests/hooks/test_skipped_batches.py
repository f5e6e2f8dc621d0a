"""SkippedBatchesHook in a real run in half precision, with an image that overflows."""
import json
from pathlib import Path

import pytest
from mmengine.hooks import Hook
from mmengine.runner import Runner

from slab_det.layers.offline_norm import named_offline_norms


class Overflow(Hook):
    """Makes the images of one iteration infinite."""

    def __init__(self, iteration):
        self.iteration = iteration

    def before_train(self, runner):
        runner.model.backbone.register_forward_pre_hook(
            lambda module, args: (args[0] * float('inf'),) if runner.iter == self.iteration else None)


@pytest.mark.parametrize('norm', ['PRepBN', 'UN'])
@pytest.mark.parametrize('bad', [3, None], ids=['overflow', 'finite'])
def test_a_batch_that_is_skipped_is_counted_and_warned_of_once(small_run_cfg, norm, bad):
    cfg = small_run_cfg('run', 6, norm_cfg=dict(type=norm))
    # The scaler takes the step back, which weights would not survive.
    cfg.optim_wrapper.update(type='AmpOptimWrapper', dtype='float16', loss_scale=dict(init_scale=256.0))
    cfg.custom_hooks = [dict(type='UnifiedNormHook')] if norm == 'UN' else []
    cfg.default_hooks.logger.interval = 2
    cfg.update(val_dataloader=None, val_cfg=None, val_evaluator=None)
    # There is one visualizer of a name in a process, and it writes into the folder of its first run.
    cfg.visualizer.name = f'{norm}-{bad}'
    runner = Runner.from_cfg(cfg)
    runner.register_hook(Overflow(bad))
    runner.train()
    folder = Path(runner.work_dir, runner.timestamp)
    warnings = [line for line in next(folder.glob('*.log')).read_text().splitlines() if 'NaN or infinite' in line]
    records = map(json.loads, (folder / 'vis_data/scalars.json').read_text().splitlines())
    counts = [record.get('norm_skipped') for record in records if 'loss' in record]
    if bad is None:
        assert not warnings and counts == [None] * 3
        return
    names = [name for name, _ in named_offline_norms(runner.model)]
    assert len(warnings) == 1 and f'{len(names)} of {len(names)} norms' in warnings[0]
    assert f'{names[0]} 1, at most 1 since' in warnings[0]
    assert counts == [None, 1, 1]
