"""StatisticsDriftHook: by how much running statistics move while a detector is trained."""

from __future__ import annotations

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from slab_det.hooks.norm_state import is_logged
from slab_det.norms import named_offline_norms
from slab_det.recalibration.drift import copy_statistics, statistics_drift
from slab_det.runtime.distributed import unwrap


@HOOKS.register_module()
class StatisticsDriftHook(Hook):
    """Logs ``drift_mean`` and ``drift_log_var``: by how much running statistics moved since LoggerHook logged last.

    The averages of BatchNorm forget within tens of iterations, as many as lie between two logs. So this is what the
    weights moved them by, and the noise of batches.
    """

    # Before LoggerHook.
    priority = 55

    def before_train(self, runner: Runner) -> None:
        self._norms = dict(named_offline_norms(unwrap(runner.model)))
        self._before = copy_statistics(self._norms)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict | None = None, outputs: dict | None = None
    ) -> None:
        if not self._norms or not is_logged(runner, batch_idx):
            return
        drift = statistics_drift(self._norms, self._before)
        runner.message_hub.update_scalars({'train/drift_mean': drift.mean, 'train/drift_log_var': drift.log_var})
        self._before = copy_statistics(self._norms)
