"""NormStateHook: the training state of norms starts with a run; missing hooks and broken statistics are warned of."""

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
    """Resets moving averages where a training starts; warns of missing hooks, and of statistics that are not finite.

    UN, MABN and PowerNorm begin a fine-tuning with a warm-up and empty windows, because its batches and gradients are
    not those of the training before; their running variance comes from the loaded weights. ``--resume`` keeps the whole
    state, and freezes no statistics under ``norm_eval`` that the run itself began.

    A batch with NaN or infinite values, as mixed precision makes now and then, stays in the running statistics of
    BatchNorm's kinds. Training does not read them, and recalibration estimates them anew: only validations before the
    end of the run find nothing. A warning there says so.

    ``custom_hooks`` of a config replaces those of its base. Before the first iteration a warning, and at the end an
    error in the log, tell of PRepBN that no ProgressiveNormHook lowers, and of norms that no RecalibrateFuseHook fuses.
    """

    def __init__(self) -> None:
        self._resumed = False
        # Norms whose statistics are this run's own, as a resumed checkpoint says.
        self._live: list[str] = []

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # Not in before_train: --resume without a checkpoint to resume from is a new run.
        self._resumed = runner._resume
        self._live = checkpoint.get('slab_det', {}).get('live', []) if self._resumed else []

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # norm_eval freezes statistics that were loaded. Resuming loads all of them, but must freeze no others.
        live = [name for name, norm in named_offline_norms(unwrap(runner.model)) if not norm.statistics_loaded]
        if live:
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
                'from batches that overflowed: validation finds nothing. If the loss is finite, training goes on as '
                'it should, and recalibration at the end of the run replaces them; else lower the learning rate or '
                'look at the images'
            )


def _log_missing_hooks(runner: Runner, level: int) -> None:
    """Tells of each hook that the norms of the model need and the run does not have."""
    model = unwrap(runner.model)
    needs = (
        (
            ProgressiveNormHook,
            [name for name, norm in named_progressive_norms(model).items() if norm.gamma > 0],
            'stay LayerNorm (gamma > 0) and cannot be fused',
        ),
        (
            RecalibrateFuseHook,
            [name for name, _ in named_offline_norms(model)],
            'are neither recalibrated nor fused when the run ends (slab-det recalibrate and slab-det fuse do it later)',
        ),
    )
    for hook, norms, consequence in needs:
        if norms and not any(isinstance(other, hook) for other in runner.hooks):
            # mmengine drops warnings that repeat.
            runner.logger.log(
                level,
                f'Iteration {runner.iter}: this run has no {hook.__name__}, so {len(norms)} norms ({norms[0]} for one) '
                f'{consequence}. custom_hooks of a config replaces the list of its _base_: name that hook again, as '
                'configs/_base_/prepbn.py does',
            )
