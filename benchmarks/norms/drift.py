"""Statistics drift: by how much the running statistics of a detector move, in training or by a recalibration."""
from __future__ import annotations

import torch
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor, nn

from slab_det.distributed import unwrap
from slab_det.hooks.log_interval import logs_after
from slab_det.layers.offline_norm import named_offline_norms

Statistics = list[tuple[Tensor, Tensor, float]]


def statistics(model: nn.Module) -> Statistics:
    """Mean, variance and eps of every offline norm."""
    return [(*(values.double().clone() for values in norm.statistics()), norm.eps)
            for _, norm in named_offline_norms(model)]


def drift(before: Statistics, after: Statistics) -> dict[str, float]:
    """By how much statistics moved: means in sigmas of before, and log variances; mean and largest of all channels."""
    means = torch.cat([(mean - old_mean).abs() / (old_var + eps).sqrt()
                       for (old_mean, old_var, eps), (mean, _, _) in zip(before, after, strict=True)])
    log_vars = torch.cat([((var + eps) / (old_var + eps)).log().abs()
                          for (_, old_var, eps), (_, var, _) in zip(before, after, strict=True)])
    return dict(mean=means.mean().item(), largest_mean=means.max().item(),
                log_var=log_vars.mean().item(), largest_log_var=log_vars.max().item())


@HOOKS.register_module()
class StatisticsDriftHook(Hook):
    """Logs ``drift_mean`` and ``drift_log_var``: by how much running statistics moved since LoggerHook logged last.

    The averages of BatchNorm forget within tens of iterations, as many as lie between two logs. So this is what the
    weights moved them by, and the noise of batches.
    """

    # Before LoggerHook.
    priority = 55

    def __init__(self) -> None:
        self._before: Statistics = []

    def before_train(self, runner: Runner) -> None:
        self._before = statistics(unwrap(runner.model))

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None,
                         outputs: dict | None = None) -> None:
        if not self._before or not logs_after(runner, batch_idx):
            return
        after = statistics(unwrap(runner.model))
        moved = drift(self._before, after)
        for name in ('mean', 'log_var'):
            runner.message_hub.update_scalar(f'train/drift_{name}', moved[name])
        self._before = after
