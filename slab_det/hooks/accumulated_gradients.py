"""AccumulatedGradientsHook: a run that is interrupted between two updates keeps the gradients summed so far."""

from __future__ import annotations

from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch.distributed.fsdp import FullyShardedDataParallel

from slab_det.runtime.distributed import unwrap


@HOOKS.register_module()
class AccumulatedGradientsHook(Hook):
    """Saves gradients in checkpoints between two updates of gradient accumulation; ``--resume`` restores them.

    mmengine drops them and goes on counting, so that the first update after it is made of fewer images. Such a
    checkpoint is larger by the size of the weights; those right after an update, and thus all without
    ``accumulative_counts``, are as they were. With several processes all get the gradients of the main one, a fair
    sample of what each had. Resumed with another ``accumulative_counts``, or with FSDP, they are dropped.
    """

    def __init__(self) -> None:
        self._resumed: dict | None = None

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        if _accumulates(runner) and not runner.optim_wrapper.should_update():
            parameters = unwrap(runner.model).named_parameters()
            checkpoint['accumulated_gradients'] = dict(
                counts=runner.optim_wrapper._accumulative_counts,
                gradients={
                    name: parameter.grad.detach().cpu() for name, parameter in parameters if parameter.grad is not None
                },
            )

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self._resumed = checkpoint.get('accumulated_gradients') if runner._resume else None

    def before_train(self, runner: Runner) -> None:
        resumed, self._resumed = self._resumed, None
        if not (resumed and _accumulates(runner) and resumed['counts'] == runner.optim_wrapper._accumulative_counts):
            return
        for name, parameter in unwrap(runner.model).named_parameters():
            if name in resumed['gradients']:
                parameter.grad = resumed['gradients'][name].to(parameter)
        # mmengine has warned that they are lost.
        runner.logger.info('AccumulatedGradientsHook: restored the gradients of the iterations since the last update')


def _accumulates(runner: Runner) -> bool:
    # Of a model in shards, the main process has only its own.
    return isinstance(runner.optim_wrapper, OptimWrapper) and not isinstance(runner.model, FullyShardedDataParallel)
