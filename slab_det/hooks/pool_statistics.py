"""PoolStatisticsHook: all processes of a run validate, save and go on with the same statistics."""

from __future__ import annotations

import torch
from mmengine.dist import all_gather, all_gather_object, get_world_size
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from slab_det.norms import OfflineNorm, TokenBN, named_offline_norms, named_quadratic_norms
from slab_det.runtime.distributed import unwrap
from slab_det.runtime.errors import SlabDetError

# With fewer images than this in each process, norms that do not say otherwise take the images of all processes.
SYNC_BELOW = 2


@HOOKS.register_module()
class PoolStatisticsHook(Hook):
    """Makes norms one over all processes, where mmengine leaves each process its own; without effect in one process.

    Before every validation and every checkpoint the running statistics of all processes are pooled: mean and variance
    as of the union of what each has seen, other averages by their mean. So every process validates the model that is
    saved, and a resumed run goes on from where this one does. PyTorch's BatchNorm is pooled too.

    The hook also decides for TokenBN, RepBN and PRepBN whose ``sync`` is None whether a training batch is that of one
    process or of all: each process normalises alone, as in SLAB's code, unless it has a single image.

    Processes that would start at different iterations, because one sees a checkpoint and another does not, stop.
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
        undecided = [module for module in runner.model.modules() if isinstance(module, TokenBN) and module.sync is None]
        if get_world_size() == 1 or not undecided:
            return
        images = getattr(runner.train_dataloader.batch_sampler, 'batch_size', None)
        if images is None:
            raise SlabDetError(
                f'PoolStatisticsHook: {type(runner.train_dataloader.batch_sampler).__name__} does not say how many '
                'images a batch has; set sync=True or sync=False in norm_cfg'
            )
        for norm in undecided:
            norm.sync = images < SYNC_BELOW
        runner.logger.info(
            f'PoolStatisticsHook: {len(undecided)} norms take their statistics from the images of '
            f'{"all processes" if undecided[0].sync else "their process"}, {images} per process'
        )

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict | None = None, outputs: dict | None = None
    ) -> None:
        if any(_saves_after_iter(hook, runner) for hook in runner.hooks):
            self._pool(runner)

    def after_train_epoch(self, runner: Runner) -> None:
        self._pool(runner)

    def before_val(self, runner: Runner) -> None:
        self._pool(runner)

    def after_train(self, runner: Runner) -> None:
        self._pool(runner)

    def _pool(self, runner: Runner) -> None:
        if get_world_size() == 1:
            return
        averaged = [hook.ema_model.module for hook in runner.hooks if isinstance(hook, EMAHook)]
        for model in (unwrap(runner.model), *averaged):
            pool_statistics(model)


def _saves_after_iter(hook: Hook, runner: Runner) -> bool:
    """Whether this is a CheckpointHook that saves after the current iteration: the condition is mmengine's."""
    return (
        isinstance(hook, CheckpointHook)
        and not hook.by_epoch
        and (
            hook.every_n_train_iters(runner, hook.interval, hook.save_begin)
            or (hook.save_last and hook.is_last_train_iter(runner))
        )
    )


@torch.no_grad()
def pool_statistics(model: nn.Module) -> None:
    """Pools the statistics and averages of all norms of ``model`` over all processes, each of which counts the same.

    All processes must call it with the same architecture; afterwards they have the same buffers to the last bit.
    Buffers that were the same before do not change.
    """
    batch_norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    norms = [
        *(norm for _, norm in named_offline_norms(model)),
        *(norm for norm in batch_norms if norm.running_mean is not None),
    ]
    if not norms:
        return
    own = torch.stack([torch.cat(values).double() for values in zip(*map(_statistics, norms), strict=True)])
    means, variances = torch.stack(all_gather(own)).unbind(1)
    # As if each process had seen one token with this variance.
    mean, var = means.mean(0), variances.mean(0) + means.var(0, correction=0)
    sizes = [_statistics(norm)[0].numel() for norm in norms]
    for norm, *pooled in zip(norms, mean.split(sizes), var.split(sizes), strict=True):
        if isinstance(norm, OfflineNorm):
            norm.set_statistics(*pooled)
        else:
            norm.running_mean.copy_(pooled[0])
            norm.running_var.copy_(pooled[1])
    for norm in named_quadratic_norms(model).values():
        if not norm.sync:
            norm.pool_averages()


def _statistics(norm: OfflineNorm | _BatchNorm) -> tuple[Tensor, Tensor]:
    return norm.statistics() if isinstance(norm, OfflineNorm) else (norm.running_mean, norm.running_var)
