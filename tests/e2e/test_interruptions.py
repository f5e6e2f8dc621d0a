"""A run with every hook and every way of saving memory is killed where it hurts most: it ends as if it had not been."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import CONFIGS
from interruptions import FORK_SERVER, Interruptions, KillPoint, WholeFiles
from mmengine.config import Config
from mmengine.hooks import CheckpointHook, EMAHook, LoggerHook
from mmengine.runner import Runner

from slab_det.hooks import (
    CheckedLoadHook,
    ExactResumeHook,
    ProgressiveNormHook,
    RecalibrateFuseHook,
)

MAX_ITERS = 6


@pytest.fixture(scope='module')
def cfg(module_run_cfg) -> Config:
    """A training whose loss, data and layers all draw random numbers."""
    cfg = module_run_cfg('unused', MAX_ITERS, with_cp=True, drop_path_rate=0.3)
    cfg.train_dataloader.dataset.pipeline.insert(
        2, dict(type='RandomChoiceResize', scales=[(40, 40), (70, 90), (96, 120)], keep_ratio=False)
    )
    # The checkpoint after two iterations holds accumulated gradients.
    cfg.optim_wrapper.accumulative_counts = 3
    cfg.train_cfg.val_interval = 4
    cfg.default_hooks.checkpoint.max_keep_ckpts = 1
    cfg.default_hooks.logger.interval = 1
    cfg.custom_hooks[1].tol = 0.0
    cfg.custom_hooks.append(dict(type='EMAHook', momentum=0.2))
    return cfg


@pytest.fixture(scope='module')
def runs(cfg, tmp_path_factory) -> Iterator[Interruptions]:
    """That training, run once to the end."""
    folder = tmp_path_factory.mktemp('interruptions')
    cfg.dump(folder / 'small.py')
    with pytest.MonkeyPatch.context() as patch:
        # All runs are forked from a process that imports this file's conftest, for what it saves in runs.
        patch.setenv('PYTHONPATH', f'{Path(__file__).parents[1]}:{CONFIGS.parent}')
        FORK_SERVER.set_forkserver_preload(
            ['conftest', 'slab_det.cli.config', 'slab_det.backbones', 'mmdet.evaluation']
        )
        yield Interruptions(folder / 'small.py', folder)


@pytest.mark.parametrize(
    'point',
    [
        KillPoint('decay', f'Iter(train) [3/{MAX_ITERS}]'),
        KillPoint('recalibration', 'Recalibration, pass 2'),
        KillPoint('fused checkpoint', 'Recalibration, pass 1', '.fused.pth.0.tmp'),
    ],
    ids=lambda point: point.kind,
)
def test_a_killed_run_ends_as_the_uninterrupted_one(runs, point):
    kill = runs.kill(point)
    assert (kill['largest_difference'], kill['gamma'], kill['same_report']) == (0, 0, True), kill
    assert not kill['torn'] and bool(kill['unfinished']) == (point.writes is not None), kill
    assert kill['resumed_from'] == f'iter_{2 if point.kind == "decay" else MAX_ITERS}', kill


def test_hooks_run_in_the_order_that_each_needs(cfg):
    """As :mod:`slab_det.hooks` says."""
    hooks = [type(hook) for hook in Runner.from_cfg(cfg).hooks]
    at = {hook: hooks.index(hook) for hook in hooks}
    assert at[CheckedLoadHook] < at[EMAHook] < at[ProgressiveNormHook] < at[LoggerHook] < at[RecalibrateFuseHook]
    assert at[ExactResumeHook] < at[RecalibrateFuseHook] < at[CheckpointHook]


def test_the_comparison_sees_a_torn_file(tmp_path):
    files = WholeFiles(tmp_path)
    torch.save(dict(a=torch.ones(100)), tmp_path / 'iter_2.pth')
    files.check()
    assert not files.torn
    (tmp_path / 'iter_4.pth').write_bytes((tmp_path / 'iter_2.pth').read_bytes()[:-50])
    (tmp_path / 'report.json').write_text('{"schema": 1, "entr')
    files.check()
    torn = sorted(message.partition(':')[0] for message in files.torn)
    assert torn == ['iter_4.pth', 'report.json']
