"""NormStateHook: the training state of norms starts with a run, and what norms leave out is logged."""

from __future__ import annotations

import torch
from mmengine.hooks import Hook, LoggerHook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor

from slab_det.norms import UN, named_quadratic_norms, skipped_batches
from slab_det.runtime.distributed import unwrap


@HOOKS.register_module()
class NormStateHook(Hook):
    """Resets moving averages where a training starts; logs skipped batches and UN's filter.

    UN, MABN and PowerNorm begin a fine-tuning with a warm-up and empty windows, because batches and gradients are
    others than before; their running variance comes from the loaded weights. ``--resume`` keeps the whole state.

    ``norm_skipped`` in the log counts the batches that a norm left out of its statistics because of NaN or infinite
    values, since the run or its last ``--resume`` began: the largest count of any norm and process, not logged while
    it is 0. New ones are warned of. A few in half precision are harmless, because the gradient scaler skips their step.

    ``un_filtered`` is the share of iterations after the warm-up in which UN's outlier filter fired, averaged over the
    UN layers.

    Counters are read from the device when LoggerHook is about to log, those of all norms at once.
    """

    # Before LoggerHook (BELOW_NORMAL).
    priority = 55

    def __init__(self) -> None:
        self._resumed = False
        self._skipped: dict[str, int] = {}
        self._filters: list[UN] = []

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # Not in before_train: --resume without a checkpoint to resume from is a new run.
        self._resumed = runner._resume

    def before_train(self, runner: Runner) -> None:
        model = unwrap(runner.model)
        norms = named_quadratic_norms(model).values()
        if not self._resumed:
            for norm in norms:
                norm.reset_state()
        self._skipped = skipped_batches(model)
        self._filters = [norm for norm in norms if isinstance(norm, UN) and norm.filter_outliers]

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict | None = None, outputs: dict | None = None
    ) -> None:
        if not is_logged(runner, batch_idx):
            return
        self._log_skipped(runner)
        if self._filters:
            runner.message_hub.update_scalar('train/un_filtered', filtered_share(self._filters))

    def _log_skipped(self, runner: Runner) -> None:
        before, self._skipped = self._skipped, skipped_batches(unwrap(runner.model))
        if any(self._skipped.values()):
            # Not to be resumed: counters are not.
            runner.message_hub.update_scalar('train/norm_skipped', max(self._skipped.values()), resumed=False)
        new = {name: count - before[name] for name, count in self._skipped.items() if count > before[name]}
        if new:
            # The first norm of the network is where it began. mmengine drops warnings that repeat: the iteration
            # makes each text a new one.
            name, count = next(iter(new.items()))
            runner.logger.warning(
                f'Up to iteration {runner.iter + 1} {len(new)} of {len(self._skipped)} norms met NaN or infinite '
                f'values and left those batches out of their statistics: {name} {count}, at most {max(new.values())} '
                'since the last line of the log. A few are harmless under --amp; if they go on, lower the learning '
                'rate or look at the images and the losses'
            )


def is_logged(runner: Runner, batch_idx: int) -> bool:
    """Whether LoggerHook logs the training iteration that has just ended."""
    loader = runner.train_dataloader
    return any(
        hook.every_n_inner_iters(batch_idx, hook.interval)
        or (hook.end_of_epoch(loader, batch_idx) and (not hook.ignore_last or len(loader) <= hook.interval))
        for hook in runner.hooks
        if isinstance(hook, LoggerHook)
    )


def filtered_share(norms: list[UN]) -> Tensor:
    """Share of the iterations after the warm-up in which the filter fired, averaged over ``norms``, 0-d."""
    fired = torch.stack([norm.num_filtered for norm in norms])
    filtering = torch.stack([norm.iteration - norm.warmup_iters for norm in norms])
    return (fired / filtering.clamp(min=1)).mean()
