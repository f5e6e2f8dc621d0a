"""ProgressiveNormHook: lowers gamma from LayerNorm to RepBN over the iterations of the runner."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from mmengine.dataset import InfiniteSampler
from mmengine.dist import get_world_size
from mmengine.hooks import EarlyStoppingHook, Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from slab_det.common.distributed import unwrap
from slab_det.common.errors import SlabDetError
from slab_det.norms import PRepBN, named_progressive_norms

# gamma / gamma_start after a fraction t of the decay. 'linear' is eq. 4 of SLAB.
DECAYS: dict[str, Callable[[float], float]] = {
    'linear': lambda t: 1.0 - t,
    'cosine': lambda t: 0.5 * (1.0 + math.cos(math.pi * t)),
    # Four equal steps: 1, 3/4, 1/2, 1/4, 0.
    'step': lambda t: 1.0 - math.floor(4 * t) / 4,
}


@HOOKS.register_module()
class ProgressiveNormHook(Hook):
    """Lowers gamma of every PRepBN: ``gamma(t) = gamma_start * decay(t / T)``, and 0 from iteration T on.

    t is the runner's iteration; gradient accumulation, activation checkpointing and validation do not change it.
    Iteration t runs with gamma(t); validation and checkpoints after it have gamma(t + 1). gamma_start is the gamma of
    each norm once weights are loaded: 1 for LayerNorm weights or from scratch, 0 if the checkpoint's decay was
    finished. gamma never rises, continues after ``--resume``, and is logged as ``gamma``. The averaged weights of
    EMAHook and of a mean teacher get the gamma of the run, not an average of gamma.

    Args:
        decay: Shape of the decay.
        total: Length T of the decay; 0 means gamma = 0 from the start.
        unit: What ``total`` counts: a fraction of the run in [0, 1], iterations, or epochs.

    Raises:
        ValueError: If ``decay`` or ``unit`` is unknown or ``total`` is negative or, as a fraction, above 1.
    """

    # After EMAHook (NORMAL), which averages gamma too; before LoggerHook and CheckpointHook.
    priority = 55

    def __init__(
        self,
        decay: Literal['linear', 'cosine', 'step'] = 'linear',
        total: float = 0.8,
        unit: Literal['fraction', 'iter', 'epoch'] = 'fraction',
    ) -> None:
        if decay not in DECAYS:
            raise ValueError(f'unknown decay {decay!r}: choose from {sorted(DECAYS)}')
        if unit not in ('fraction', 'iter', 'epoch'):
            raise ValueError(f"unknown unit {unit!r}: choose from ['epoch', 'fraction', 'iter']")
        if total < 0 or (unit == 'fraction' and total > 1):
            raise ValueError(f'total={total} {unit} must not be negative, nor above 1 as a fraction of the run')
        self.decay = DECAYS[decay]
        self.total = total
        self.unit = unit
        self._gamma_start: dict[str, float] | None = None
        self._norms: dict[str, PRepBN] = {}
        # The same norms in averaged models, and the gamma of the run, which no average and no swap changes.
        self._averaged: list[dict[str, PRepBN]] = []
        self._gamma: dict[str, float] = {}
        self._num_iters = 0

    def before_train(self, runner: Runner) -> None:
        self._norms = named_progressive_norms(unwrap(runner.model))
        if not self._norms:
            runner.logger.warning(
                "ProgressiveNormHook: the model has no PRepBN; use norm_cfg=dict(type='PRepBN') or remove the hook"
            )
        if self.unit == 'epoch':
            loader = runner.train_dataloader
            # mmengine's InfiniteSampler has the length of the dataset, and each process sees a share of it.
            ranks = (
                get_world_size() if isinstance(getattr(loader.batch_sampler, 'sampler', None), InfiniteSampler) else 1
            )
            self._num_iters = round(self.total * len(loader) / ranks)
        else:
            self._num_iters = round(self.total * (runner.max_iters if self.unit == 'fraction' else 1))
        if self._gamma_start is None:
            self._gamma_start = {name: norm.gamma for name, norm in self._norms.items()}
        elif set(self._gamma_start) != set(self._norms):
            raise SlabDetError(
                'the checkpoint to resume from was trained with other PRepBN layers than this config has; resume with '
                'the config in its work_dir'
            )
        averages = [average for hook in runner.hooks if (average := getattr(hook, 'ema_model', None)) is not None]
        self._averaged = [named_progressive_norms(average.module) for average in averages]
        self._gamma = {name: norm.gamma for name, norm in self._norms.items()}
        self._check_frozen(runner)
        self._set_gamma(runner.iter)
        runner.logger.info(
            f'ProgressiveNormHook: {len(self._norms)} norms reach gamma = 0 after {self._num_iters} of '
            f'{runner.max_iters} iterations; now gamma = {self._largest_gamma():g}'
        )
        if self._largest_gamma() > 0 and self._num_iters > runner.max_iters:
            runner.logger.warning(
                f'this run ends before gamma is 0, so that nothing is fused; lower `total` ({self.total} {self.unit})'
            )
        if self._largest_gamma() > 0 and any(isinstance(hook, EarlyStoppingHook) for hook in runner.hooks):
            runner.logger.warning(
                f'EarlyStoppingHook may end this run before iteration {self._num_iters}, at which gamma is 0: then '
                "nothing is fused. Give ProgressiveNormHook fewer iterations, such as total=1000, unit='iter', or "
                'remove EarlyStoppingHook from custom_hooks'
            )

    def _check_frozen(self, runner: Runner) -> None:
        """Raises SlabDetError if lowering gamma would turn a frozen norm into a RepBN without statistics."""
        # With skip_buffer=False, mmdet's MeanTeacherHook averages the student's statistics into the frozen teacher.
        has_teacher = any(getattr(hook, 'skip_buffers', True) is False for hook in runner.hooks)
        frozen = [
            name
            for name, norm in self._norms.items()
            if self._gamma[name] > 0
            and not norm.statistics_loaded
            and not any(parameter.requires_grad for parameter in norm.parameters())
            and not (has_teacher and name.startswith('teacher.'))
        ]
        if frozen:
            raise SlabDetError(
                f'{len(frozen)} frozen norms are still LayerNorm ({frozen[0]}, ...): lowering gamma would replace them '
                'by a RepBN that never trained. Set frozen_stages=-1, or start from a checkpoint whose decay was '
                'finished. The teacher of MeanTeacherHook needs its skip_buffer=False'
            )

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        runner.message_hub.update_scalar('train/gamma', self._largest_gamma())

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict | None = None, outputs: dict | None = None
    ) -> None:
        self._set_gamma(runner.iter + 1)

    def after_train(self, runner: Runner) -> None:
        gamma = self._largest_gamma()
        if gamma > 0:
            runner.logger.error(
                f'The run ended with gamma = {gamma:g}: the norms still contain LayerNorm and cannot be fused. Lower '
                f'`total` of ProgressiveNormHook (now {self.total} {self.unit}) or train longer with --resume.'
            )

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        if self._gamma_start is None:
            return
        checkpoint.setdefault('slab_det', {})['gamma_start'] = self._gamma_start
        # The float64 of an average may have been rounded since; the checkpoint must hold the runner's gamma.
        for state_dict, prefix in ((checkpoint['state_dict'], ''), (checkpoint.get('ema_state_dict', {}), 'module.')):
            for name, gamma in self._gamma.items():
                key = f'{prefix}{name}._gamma'
                if key in state_dict:
                    state_dict[key] = torch.tensor(gamma, dtype=torch.float64)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        if runner._resume:
            self._gamma_start = checkpoint.get('slab_det', {}).get('gamma_start')

    def _set_gamma(self, iteration: int) -> None:
        left = 0.0 if iteration >= self._num_iters else self.decay(iteration / self._num_iters)
        for name, gamma in self._gamma.items():
            # A finished run that is resumed with more iterations has a longer decay; min() keeps gamma from rising.
            self._gamma[name] = min(gamma, self._gamma_start[name] * left)
            # EMAHook swaps weights with its average for each validation: the average must hold the same gamma.
            for norms in (self._norms, *self._averaged):
                norms[name].gamma = self._gamma[name]

    def _largest_gamma(self) -> float:
        return max(self._gamma.values(), default=0.0)
