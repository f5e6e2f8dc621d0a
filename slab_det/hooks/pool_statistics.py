"""PoolStatisticsHook: all processes of a run validate, save and go on with the same statistics."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from mmengine.dist import all_gather_object, get_world_size
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from slab_det.norms import OfflineNorm, TokenBN, named_offline_norms, named_quadratic_norms
from slab_det.recalibration.moments import pool_moments
from slab_det.runtime.distributed import unwrap
from slab_det.runtime.errors import SlabDetError


@HOOKS.register_module()
class PoolStatisticsHook(Hook):
    """Makes norms one over all processes, where mmengine leaves each process its own; without effect in one process.

    Before every validation and every checkpoint the running statistics of all processes are pooled: mean and variance
    as of the union of what each has seen, other averages by their mean. So every process validates the model that is
    saved, and a resumed run goes on from where this one does. PyTorch's BatchNorm is pooled too.

    It also decides for TokenBN, RepBN and PRepBN whose ``sync`` is None whether a training batch is that of one process
    or of all: each process normalises alone, as in SLAB's code, unless it has fewer than ``sync_below`` images.

    Processes that would start at different iterations, because one sees a checkpoint and another does not, stop.

    Args:
        sync_below: Images per process from which on norms that do not say otherwise are not synchronised.
    """

    # After EMAHook (NORMAL), before RecalibrateFuseHook and CheckpointHook (VERY_LOW).
    priority = 80

    def __init__(self, sync_below: int = 2) -> None:
        self.sync_below = sync_below

    def before_train(self, runner: Runner) -> None:
        _check_same_start(runner)
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
            norm.sync = images < self.sync_below
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


def _check_same_start(runner: Runner) -> None:
    """Raises SlabDetError, in every process, if some resume and others find no checkpoint to resume from."""
    starts = all_gather_object(runner.iter)
    if len(set(starts)) > 1:
        raise SlabDetError(
            f'the processes start at iterations {starts}: the checkpoint to resume from must be where '
            'each of them looks for it; copy it there, or name it with --resume'
        )


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
    """Pools what the norms of ``model`` remember over all processes, each of which counts the same.

    All processes must call it with the same architecture; afterwards they have the same buffers to the last bit. Where
    they had them before, nothing changes.
    """
    norms = [*(norm for _, norm in named_offline_norms(model)), *_torch_batch_norms(model)]
    if not norms:
        return
    mean, var = (torch.cat(values).double() for values in zip(*map(_statistics, norms), strict=True))
    # As if each process had seen one token with this variance.
    count, mean, m2 = pool_moments(mean.new_ones(1), mean, var)
    sizes = [_statistics(norm)[0].numel() for norm in norms]
    for norm, *pooled in zip(norms, mean.split(sizes), (m2 / count).split(sizes), strict=True):
        _set_statistics(norm, *pooled)
    for norm in named_quadratic_norms(model).values():
        if not norm.sync:
            norm.pool_averages()


def _torch_batch_norms(model: nn.Module) -> Iterator[_BatchNorm]:
    return (module for module in model.modules() if isinstance(module, _BatchNorm) and module.running_mean is not None)


def _statistics(norm: OfflineNorm | _BatchNorm) -> tuple[Tensor, Tensor]:
    return norm.statistics() if isinstance(norm, OfflineNorm) else (norm.running_mean, norm.running_var)


def _set_statistics(norm: OfflineNorm | _BatchNorm, mean: Tensor, var: Tensor) -> None:
    if isinstance(norm, OfflineNorm):
        norm.set_statistics(mean, var)
    else:
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(var)
