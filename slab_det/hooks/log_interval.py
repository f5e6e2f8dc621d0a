"""When mmengine's LoggerHook logs: what costs a read of the device is read only then."""

from __future__ import annotations

from mmengine.hooks import LoggerHook
from mmengine.runner import Runner


def logs_after(runner: Runner, batch_idx: int) -> bool:
    """Whether the training iteration that has just ended is one that LoggerHook logs."""
    loader = runner.train_dataloader
    return any(
        hook.every_n_inner_iters(batch_idx, hook.interval)
        or (hook.end_of_epoch(loader, batch_idx) and (not hook.ignore_last or len(loader) <= hook.interval))
        for hook in runner.hooks
        if isinstance(hook, LoggerHook)
    )
