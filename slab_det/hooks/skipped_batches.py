"""SkippedBatchesHook: batches that norms leave out of their statistics do not go unnoticed."""

from __future__ import annotations

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from slab_det.hooks.log_interval import logs_after
from slab_det.norms import skipped_batches
from slab_det.runtime.distributed import unwrap


@HOOKS.register_module()
class SkippedBatchesHook(Hook):
    """Warns of NaN and infinite values in offline norms since the last line of the log; counts in ``norm_skipped``.

    Such a batch leaves no trace in running statistics, and a gradient scaler skips its step. So a few in a run in half
    precision are harmless; many mean that the statistics come from a selection. ``norm_skipped`` is the number of
    batches, of the norm and the process that skipped most, since the run or its last ``--resume`` began; it is not
    logged while it is 0. Counters are read when LoggerHook logs, all norms and processes at once.
    """

    # Before LoggerHook, as ProgressiveNormHook.
    priority = 55

    def __init__(self) -> None:
        self._before: dict[str, int] = {}

    def before_train(self, runner: Runner) -> None:
        self._before = skipped_batches(unwrap(runner.model))

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict | None = None, outputs: dict | None = None
    ) -> None:
        if not logs_after(runner, batch_idx):
            return
        now = skipped_batches(unwrap(runner.model))
        new = {name: count - self._before[name] for name, count in now.items() if count > self._before[name]}
        self._before = now
        if any(now.values()):
            # Not to be resumed: counters are not.
            runner.message_hub.update_scalar('train/norm_skipped', max(now.values()), resumed=False)
        if new:
            # The first in the order of the network is where it began. The iteration makes the text one that mmengine
            # has not logged before: it drops warnings that repeat.
            name, count = next(iter(new.items()))
            runner.logger.warning(
                f'Up to iteration {runner.iter + 1} {len(new)} of {len(now)} norms met NaN or infinite values and left '
                f'those batches out of their statistics: {name} {count}, at most {max(new.values())} since the last '
                'line of the log. A few are harmless under --amp; if they go on, lower the learning rate or look at '
                'the images and the losses'
            )
