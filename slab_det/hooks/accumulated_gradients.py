"""AccumulatedGradientsHook: a run that is interrupted between two updates keeps the gradients summed so far."""
from __future__ import annotations

from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from slab_det.distributed import unwrap


@HOOKS.register_module()
class AccumulatedGradientsHook(Hook):
    """Saves gradients in checkpoints between two updates of gradient accumulation; ``--resume`` restores them.

    mmengine drops them and goes on counting, so that the first update after it is made of fewer images. Checkpoints
    right after an update, and thus all without ``accumulative_counts``, are as they were. With several processes all
    get those of the main one, a fair sample of what each had.
    """

    def __init__(self) -> None:
        self._resumed: dict | None = None

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        if isinstance(runner.optim_wrapper, OptimWrapper) and not runner.optim_wrapper.should_update():
            checkpoint['accumulated_gradients'] = {
                name: parameter.grad.detach().cpu() for name, parameter in unwrap(runner.model).named_parameters()
                if parameter.grad is not None}

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self._resumed = checkpoint.get('accumulated_gradients') if runner._resume else None

    def before_train(self, runner: Runner) -> None:
        if not self._resumed:
            return
        for name, parameter in unwrap(runner.model).named_parameters():
            if name in self._resumed:
                parameter.grad = self._resumed[name].to(parameter)
        self._resumed = None
        # mmengine has warned that they are lost.
        runner.logger.info('AccumulatedGradientsHook: restored the gradients of the iterations since the last update')
