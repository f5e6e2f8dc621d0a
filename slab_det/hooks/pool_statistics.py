"""PoolStatisticsHook: all processes of a run validate, save and go on with the same statistics."""

from __future__ import annotations

import torch
from mmengine.dist import all_gather, all_gather_object, get_world_size
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from slab_det.norms import OfflineNorm, named_offline_norms
from slab_det.runtime.distributed import unwrap
from slab_det.runtime.errors import SlabDetError


@HOOKS.register_module()
class PoolStatisticsHook(Hook):
    """Pools running statistics over all processes, where mmengine leaves each process its own.

    Before every validation and every checkpoint, every process takes the mean and the variance of the union of what all
    have seen. So every process validates the model that is saved, and a resumed run goes on as this one does. The
    statistics of PyTorch's BatchNorm and of EMAHook's model are pooled too.

    If processes would start at different iterations, because one sees a checkpoint and another does not, all stop.
    """

    # After EMAHook (NORMAL), before RecalibrateFuseHook and CheckpointHook (VERY_LOW).
    priority = 80

    def before_train(self, runner: Runner) -> None:
        starts = all_gather_object(runner.iter)
        if len(set(starts)) > 1:
            raise SlabDetError(
                f'the processes start at iterations {starts}: the checkpoint to resume from must be where '
                'each of them looks for it; copy it there, or name it with --resume'
            )

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict | None = None, outputs: dict | None = None
    ) -> None:
        # CheckpointHook's own condition: no other event comes before it saves in all processes.
        if any(
            isinstance(hook, CheckpointHook)
            and not hook.by_epoch
            and (
                hook.every_n_train_iters(runner, hook.interval, hook.save_begin)
                or (hook.save_last and hook.is_last_train_iter(runner))
            )
            for hook in runner.hooks
        ):
            self._pool(runner)

    def _pool(self, runner: Runner) -> None:
        if get_world_size() == 1:
            return
        averaged = [hook.ema_model.module for hook in runner.hooks if isinstance(hook, EMAHook)]
        for model in (unwrap(runner.model), *averaged):
            pool_statistics(model)

    before_val = after_train_epoch = after_train = _pool


@torch.no_grad()
def pool_statistics(model: nn.Module) -> None:
    """Pools the statistics of all norms of ``model`` over all processes, each of which counts the same.

    All processes must call it with the same architecture; afterwards they have the same statistics to the last bit.
    Statistics that were the same before do not change.
    """
    norms = [norm for _, norm in named_offline_norms(model)]
    norms += [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms:
        return
    statistics = [n.statistics() if isinstance(n, OfflineNorm) else (n.running_mean, n.running_var) for n in norms]
    own = torch.stack([torch.cat(values).double() for values in zip(*statistics, strict=True)])
    means, variances = torch.stack(all_gather(own)).unbind(1)
    # As if each process had seen one token with this variance.
    mean, var = means.mean(0), variances.mean(0) + means.var(0, correction=0)
    sizes = [len(mean) for mean, _ in statistics]
    for norm, *pooled in zip(norms, mean.split(sizes), var.split(sizes), strict=True):
        if isinstance(norm, OfflineNorm):
            norm.set_statistics(*pooled)
        else:
            norm.running_mean.copy_(pooled[0])
            norm.running_var.copy_(pooled[1])
