"""NormStateHook: starts the moving averages of norms with a run, and warns of broken norms and missing hooks."""

from __future__ import annotations

import logging

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from slab_det.hooks.progressive_norm import ProgressiveNormHook
from slab_det.hooks.recalibrate_fuse import RecalibrateFuseHook
from slab_det.norms import QuadraticNorm, named_offline_norms, named_progressive_norms
from slab_det.runtime.distributed import unwrap


@HOOKS.register_module()
class NormStateHook(Hook):
    """Resets moving averages where a training starts, keeps them on ``--resume``, and logs what spoils the norms.

    - UN, MABN and PowerNorm begin a fine-tuning with a warm-up and empty windows, because its batches and gradients
      are not those of the training before. Their running variance stays.
    - ``norm_eval`` freezes statistics that a checkpoint brought. A resumed run does not freeze statistics that the run
      itself began.
    - A warning before validation names running statistics that are NaN or infinite, as mixed precision makes them now
      and then. Training does not read them, and recalibration estimates them anew.
    - ``custom_hooks`` of a config replaces the hooks of its base. A warning before the first iteration, and an error in
      the log at the end, name PRepBN that no ProgressiveNormHook lowers and norms that no RecalibrateFuseHook fuses.
    """

    def __init__(self) -> None:
        self._resumed = False
        # Names of norms whose statistics this run began before it was interrupted.
        self._live: list[str] = []

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # Not in before_train: --resume without a checkpoint to resume from is a new run.
        self._resumed = runner._resume
        self._live = checkpoint.get('slab_det', {}).get('live', []) if self._resumed else []

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        live = [name for name, norm in named_offline_norms(unwrap(runner.model)) if not norm.statistics_loaded]
        checkpoint.setdefault('slab_det', {})['live'] = live

    def before_train(self, runner: Runner) -> None:
        model = unwrap(runner.model)
        for name in self._live:
            model.get_submodule(name).statistics_loaded = False
        for module in model.modules():
            if isinstance(module, QuadraticNorm) and not self._resumed:
                module.reset_state()
        _log_missing_hooks(runner, logging.WARNING)

    def after_train(self, runner: Runner) -> None:
        _log_missing_hooks(runner, logging.ERROR)

    def before_val(self, runner: Runner) -> None:
        norms = dict(named_offline_norms(unwrap(runner.model)))
        broken = [name for name, norm in norms.items() if not all(v.isfinite().all() for v in norm.statistics())]
        if broken:
            # mmengine drops warnings that repeat.
            runner.logger.warning(
                f'{len(broken)} of {len(norms)} norms have NaN or infinite running statistics, {broken[0]} for one, '
                'from batches that overflowed: validation finds nothing. If the loss is finite, go on: recalibration '
                'at the end of the run replaces them. Otherwise lower the learning rate or check the images'
            )


def _log_missing_hooks(runner: Runner, level: int) -> None:
    """Names each hook that the norms of the model need and the run does not have."""
    model = unwrap(runner.model)
    mixed = [name for name, norm in named_progressive_norms(model).items() if norm.gamma > 0]
    offline = [name for name, _ in named_offline_norms(model)]
    for hook, norms, consequence in (
        (ProgressiveNormHook, mixed, 'stay LayerNorm (gamma > 0) and cannot be fused'),
        (RecalibrateFuseHook, offline, 'are not fused when the run ends (slab-det recalibrate and fuse do it later)'),
    ):
        if norms and not any(isinstance(other, hook) for other in runner.hooks):
            runner.logger.log(
                level,
                f'Iteration {runner.iter}: this run has no {hook.__name__}, so {len(norms)} norms ({norms[0]} for one) '
                f'{consequence}. custom_hooks of a config replaces the list of its _base_: name that hook again, as '
                'configs/_base_/prepbn.py does',
            )
