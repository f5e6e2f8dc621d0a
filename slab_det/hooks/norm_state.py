"""NormStateHook: resets moving averages of norms for a new run, and warns of missing hooks."""

from __future__ import annotations

from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from slab_det.common.distributed import unwrap
from slab_det.hooks.progressive_norm import ProgressiveNormHook
from slab_det.hooks.recalibrate_fuse import RecalibrateFuseHook
from slab_det.norms import QuadraticNorm, named_offline_norms, named_progressive_norms


@HOOKS.register_module()
class NormStateHook(Hook):
    """Resets moving averages where a training starts, keeps them on ``--resume``, and warns of missing hooks.

    - UN, MABN and PowerNorm begin a fine-tuning with a warm-up and empty windows, because its batches and gradients
      differ from the earlier training's. Their running variance stays.
    - ``norm_eval`` freezes statistics that were loaded from a checkpoint. A resumed run does not freeze statistics that
      the run itself estimates.
    - ``custom_hooks`` of a config replaces the hooks of its base. A warning before the first iteration names PRepBN
      that no ProgressiveNormHook lowers and norms that no RecalibrateFuseHook fuses.
    """

    def __init__(self) -> None:
        # The entry 'slab_det' of the checkpoint that this run resumes from; None for a new run.
        self._resumed: dict | None = None

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # Not in before_train: --resume without a checkpoint to resume from is a new run.
        self._resumed = checkpoint.get('slab_det', {}) if runner._resume else None

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        live = [name for name, norm in named_offline_norms(unwrap(runner.model)) if not norm.statistics_loaded]
        checkpoint.setdefault('slab_det', {})['live'] = live

    def before_train(self, runner: Runner) -> None:
        model = unwrap(runner.model)
        for module in model.modules() if self._resumed is None else ():
            if isinstance(module, QuadraticNorm):
                module.reset_state()
        for name in (self._resumed or {}).get('live', []):
            model.get_submodule(name).statistics_loaded = False
        mixed = [name for name, norm in named_progressive_norms(model).items() if norm.gamma > 0]
        offline = [name for name, _ in named_offline_norms(model)]
        later = 'are not fused when the run ends; slab-det recalibrate and fuse do it later'
        for hook, names, consequence in (
            (ProgressiveNormHook, mixed, 'stay LayerNorm (gamma > 0) and cannot be fused'),
            (RecalibrateFuseHook, offline, later),
        ):
            if names and not any(isinstance(other, hook) for other in runner.hooks):
                runner.logger.warning(
                    f'this run has no {hook.__name__}, so {len(names)} norms ({names[0]} for one) {consequence}. '
                    'custom_hooks of a config replaces the list of its _base_: name that hook again, as '
                    'configs/_base_/prepbn.py does'
                )
