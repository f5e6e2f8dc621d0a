"""FiniteLossHook: ends a training whose loss or weights are NaN or infinite."""

from __future__ import annotations

import math

import torch
from mmengine.hooks import CheckpointHook, Hook
from mmengine.optim import AmpOptimWrapper, ApexOptimWrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from slab_det.common.distributed import unwrap
from slab_det.common.errors import TrainingError, name_some
from slab_det.runtime.run_folder import find_latest_checkpoint

# So many skipped updates in a row halve a dynamic loss scale from 2^16 to below 1e-4, where fairseq gives up too.
MOST_SKIPPED = 30


@HOOKS.register_module()
class FiniteLossHook(Hook):
    """Ends a training whose loss is NaN or infinite, and saves no checkpoint whose weights are.

    Such a loss spoils all weights in its iteration, so the run ends there, before a checkpoint takes their place. With
    a loss scaler, as ``--amp`` uses it, the update is skipped and the weights stay: only ``MOST_SKIPPED`` such
    iterations in a row end the run. A finite loss may have a gradient that is not; therefore the weights are looked at
    before they are saved, and a checkpoint that was saved earlier is never removed for one of NaN.

    Raises:
        TrainingError: With the iteration, the losses or weights, the checkpoint to go on from, and what to change.
    """

    # Before EMAHook (NORMAL) averages the weights, and CheckpointHook (VERY_LOW) saves them.
    priority = 'ABOVE_NORMAL'

    def __init__(self) -> None:
        self._skipped = 0
        # Whether this run has saved a checkpoint; the folder may hold others.
        self._has_saved = False

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict | None = None, outputs: dict | None = None
    ) -> None:
        # RuntimeInfoHook has waited for the device already, to log the losses.
        losses = {key: torch.as_tensor(value).item() for key, value in (outputs or {}).items() if 'loss' in key}
        bad = ', '.join(f'{key} {value}' for key, value in losses.items() if not math.isfinite(value))
        if not bad:
            self._skipped = 0
            return
        self._skipped += 1
        where = f'iteration {runner.iter + 1}'
        if not _skips_updates(runner):
            raise TrainingError(
                f'{where}: the loss is not finite ({bad}), which spoils all weights{self._advice(runner)}'
            )
        if self._skipped == MOST_SKIPPED:
            raise TrainingError(
                f'{where}: the loss is not finite ({bad}), in {MOST_SKIPPED} iterations in a row; the loss scaler '
                f'skipped their updates, so nothing is learned{self._advice(runner)}'
            )
        if self._skipped == 1:
            runner.logger.warning(f'{where}: the loss is not finite ({bad}); the loss scaler skips the update')

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        parameters = unwrap(runner.model).named_parameters()
        bad = [name for name, value in parameters if value.requires_grad and not value.isfinite().all()]
        if bad:
            raise TrainingError(
                f'iteration {checkpoint["meta"]["iter"]}: {len(bad)} weights are not finite ({name_some(bad)}), so no '
                f'checkpoint is saved{self._advice(runner)}'
            )
        self._has_saved = True

    def _advice(self, runner: Runner) -> str:
        """What to do about a loss of NaN, as the end of a message."""
        start = runner._load_from if runner._resume else None
        if self._has_saved:
            # Not last_ckpt: CheckpointHook sets it before it saves.
            folders = [hook.out_dir for hook in runner.hooks if isinstance(hook, CheckpointHook)]
            start = find_latest_checkpoint(folders[0] if folders else runner.work_dir)
        go_on = (
            f'go on from {start}, which was saved before, with --cfg-options load_from=FILE (--resume keeps the '
            'learning rate), or '
        )
        return (
            '. Lower optim_wrapper.optimizer.lr, warm up longer or set optim_wrapper.clip_grad=dict(max_norm=1.0), and '
            f'look for damaged boxes and images; then {go_on if start else ""}start again'
        )


def _skips_updates(runner: Runner) -> bool:
    """Whether a loss scaler skips updates whose gradients are not finite."""
    wrapper = runner.optim_wrapper
    # OptimWrapperDict has several.
    wrappers = getattr(wrapper, 'optim_wrappers', {'': wrapper}).values()
    return all(isinstance(wrapper, (AmpOptimWrapper, ApexOptimWrapper)) for wrapper in wrappers)
