"""UnifiedNormHook: the moving averages of UN, MABN and PowerNorm start with a training and last as long as it does."""

from __future__ import annotations

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor

from slab_det.hooks.log_interval import logs_after
from slab_det.norms import UN, named_quadratic_norms
from slab_det.runtime.distributed import unwrap


@HOOKS.register_module()
class UnifiedNormHook(Hook):
    """Starts the state of UN, MABN and PowerNorm anew for fine-tuning, keeps it on resuming, logs UN's filter.

    Fine-tuning begins with other batches and other gradients, so with a warm-up and empty windows; the running
    variance comes from the pretrained weights. ``un_filtered`` in the log is the share of iterations after the
    warm-up in which the outlier filter fired, averaged over the UN layers. It is read from the device when LoggerHook
    is about to log, all layers at once.
    """

    # Before LoggerHook, as ProgressiveNormHook.
    priority = 55

    def __init__(self) -> None:
        self._resumed = False
        self._filters: list[UN] = []

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # Not in before_train: --resume without a checkpoint to resume from is a new run.
        self._resumed = runner._resume

    def before_train(self, runner: Runner) -> None:
        norms = named_quadratic_norms(unwrap(runner.model)).values()
        if not norms:
            runner.logger.warning(
                'UnifiedNormHook: the model has no UN, MABN or PowerNorm; '
                "use norm_cfg=dict(type='UN') or remove the hook"
            )
        if not self._resumed:
            for norm in norms:
                norm.reset_state()
        self._filters = [norm for norm in norms if isinstance(norm, UN) and norm.filter_outliers]

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict | None = None, outputs: dict | None = None
    ) -> None:
        if self._filters and logs_after(runner, batch_idx):
            runner.message_hub.update_scalar('train/un_filtered', filtered_share(self._filters))


def filtered_share(norms: list[UN]) -> Tensor:
    """Share of the iterations after the warm-up in which the filter fired, averaged over ``norms``, 0-d."""
    fired = torch.stack([norm.num_filtered for norm in norms])
    filtering = torch.stack([norm.iteration - norm.warmup_iters for norm in norms])
    return (fired / filtering.clamp(min=1)).mean()
