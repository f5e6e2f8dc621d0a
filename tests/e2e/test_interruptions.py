"""A run with every hook and every way of saving memory is killed where it hurts most: it ends as if it had not been."""

import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import CheckpointHook, EMAHook, LoggerHook
from mmengine.runner import Runner

from slab_det.cli.train import main
from slab_det.hooks import CheckedLoadHook, ExactResumeHook, ProgressiveNormHook, RecalibrateFuseHook
from slab_det.measure.report_file import read_report
from slab_det.runtime import read_checkpoint

FORK = multiprocessing.get_context('fork')
LAST = 'iter_6.pth'


@pytest.fixture
def cfg(small_run_cfg: Callable[..., Config]) -> Config:
    """A training whose loss, data and layers all draw random numbers."""
    cfg = small_run_cfg('unused', 6, with_cp=True, drop_path_rate=0.3, depths=(1, 1, 1, 1))
    cfg.train_dataloader.dataset.pipeline.insert(
        2, dict(type='RandomChoiceResize', scales=[(40, 40), (70, 90), (96, 120)], keep_ratio=False)
    )
    # The checkpoint after two iterations holds accumulated gradients.
    cfg.optim_wrapper.accumulative_counts = 3
    cfg.train_cfg.val_interval = 4
    cfg.default_hooks.checkpoint.max_keep_ckpts = 1
    cfg.custom_hooks.append(dict(type='EMAHook', momentum=0.2))
    return cfg


def train(arguments: list[str], kill_at: tuple[str, int] | None) -> None:
    """Runs ``slab-det train``, and kills this process when it writes a file of this name for the n-th time."""
    sync, writes = os.fsync, 0

    def sync_or_die(descriptor: int) -> None:
        nonlocal writes
        name, count = kill_at
        writes += f'/.{name}.' in os.readlink(f'/proc/self/fd/{descriptor}')
        if writes == count:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(descriptor)

    if kill_at:
        os.fsync = sync_or_die
    sys.argv = ['train.py', *arguments]
    main()


def run(folder: Path, *arguments: str, kill_at: tuple[str, int] | None = None) -> None:
    """Trains in a process of its own, to the end or until it is killed."""
    process = FORK.Process(target=train, args=(['small.py', '--work-dir', str(folder), *arguments], kill_at))
    process.start()
    process.join()
    assert process.exitcode == (-signal.SIGKILL if kill_at else 0)


def results(folder: Path) -> list[dict]:
    """Weights, optimizer and averaged weights of the last checkpoint, and the fused weights."""
    last, fused = read_checkpoint(folder / LAST), read_checkpoint(folder / 'fused.pth')
    return [last['state_dict'], last['optimizer'], last['ema_state_dict'], fused['state_dict']]


def test_a_run_that_is_killed_three_times_ends_as_the_uninterrupted_one(cfg, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg.dump('small.py')
    whole, killed = tmp_path / 'whole', tmp_path / 'killed'
    run(whole)
    resume: tuple[str, ...] = ()
    # While gamma falls, when the last checkpoint is replaced by the recalibrated one, and at the fused checkpoint.
    for name, count, left in (('iter_4.pth', 1, 'iter_2.pth'), (LAST, 2, LAST), ('fused.pth', 1, LAST)):
        run(killed, *resume, kill_at=(name, count))
        left_over = [path.name for path in killed.glob('.*.tmp')]
        assert len(left_over) == 1 and left_over[0].startswith(f'.{name}.'), 'it died while it wrote'
        # Every file under its final name is whole.
        assert [path.name for path in killed.glob('*.pth')] == [left]
        assert read_checkpoint(killed / left)['meta']['iter'] == int(re.search(r'\d+', left)[0])
        assert Path((killed / 'last_checkpoint').read_text()).name == left
        resume = ('--resume',)
    run(killed, *resume)
    assert not [*killed.glob('.*.tmp')]
    torch.testing.assert_close(results(killed), results(whole), rtol=0, atol=0)
    reports = [[(e.ap, e.recalibration, e.fusion) for e in read_report(f / 'report.json')] for f in (killed, whole)]
    assert reports[0] == reports[1]


def test_hooks_run_in_the_order_that_each_needs(cfg):
    """As :mod:`slab_det.hooks` says."""
    hooks = [type(hook) for hook in Runner.from_cfg(cfg).hooks]
    at = {hook: hooks.index(hook) for hook in hooks}
    assert at[CheckedLoadHook] < at[EMAHook] < at[ProgressiveNormHook] < at[LoggerHook] < at[RecalibrateFuseHook]
    assert at[ExactResumeHook] < at[RecalibrateFuseHook] < at[CheckpointHook]
