"""ExactResumeHook: a resumed run ends as it would have ended without the interruption."""

from __future__ import annotations

import torch
from mmengine.dist import all_gather_object, get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from slab_det.common.distributed import unwrap
from slab_det.common.errors import SlabDetError
from slab_det.common.random_state import random_state, set_random_state


@HOOKS.register_module()
class ExactResumeHook(Hook):
    """Saves random states and accumulated gradients in checkpoints, and restores them on ``--resume``.

    mmengine saves neither, and seeds the generators anew, from which RoI sampling, drop-path and augmentation draw.
    With this hook and ``num_workers=0``, in one process on a CPU, an interrupted and resumed run equals the
    uninterrupted one to the last bit. Workers of data loaders and processes other than the first continue with other
    random numbers. The order of images continues, with or without a seed in the config. Validation restores the
    generators afterwards, because a resumed run skips the validation that was due at its checkpoint.

    A checkpoint between two updates of gradient accumulation also holds the gradients summed so far, and is larger by
    the size of the weights. All processes get the gradients of the main process. The gradients are dropped
    if ``accumulative_counts`` was changed.

    If processes would start at different iterations, because only some of them see the checkpoint, all stop.
    """

    # After hooks that draw random numbers, before CheckpointHook (VERY_LOW).
    priority = 'LOW'

    def __init__(self) -> None:
        self._random: dict | None = None
        self._gradients: dict | None = None
        self._before_val: dict | None = None

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        seeds = [sampler.seed for sampler in _seeded_samplers(runner.train_dataloader)]
        checkpoint['random_state'] = {**random_state(), 'sampler_seed': seeds}
        if _accumulative_counts(runner) and not runner.optim_wrapper.should_update():
            parameters = unwrap(runner.model).named_parameters()
            checkpoint['accumulated_gradients'] = dict(
                counts=_accumulative_counts(runner),
                gradients={name: value.grad.detach().cpu() for name, value in parameters if value.grad is not None},
            )

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        if not runner._resume:
            return
        self._gradients = checkpoint.get('accumulated_gradients')
        self._random = checkpoint.get('random_state')
        if self._random is not None:
            samplers = _seeded_samplers(runner.train_dataloader)
            for sampler, seed in zip(samplers, self._random['sampler_seed'], strict=False):
                sampler.seed = seed

    def before_train(self, runner: Runner) -> None:
        starts = all_gather_object(runner.iter)
        if len(set(starts)) > 1:
            raise SlabDetError(
                f'the processes start at iterations {starts}: some do not find the checkpoint to resume from; copy it '
                'to the work_dir of each machine, or name it with --resume'
            )
        # Without its own generator, a DataLoader draws the seed of its workers from the global one, and a resumed run
        # draws once more. Seeds differ between processes and between starts.
        seed = runner.seed + runner.iter * get_world_size() + get_rank()
        runner.train_dataloader.generator = torch.Generator().manual_seed(seed)
        # The checkpoint has the state of the main process; the other processes must not draw the same numbers.
        if self._random is not None and get_rank() == 0:
            set_random_state(self._random)
        if self._gradients is not None and self._gradients['counts'] == _accumulative_counts(runner):
            for name, parameter in unwrap(runner.model).named_parameters():
                if name in self._gradients['gradients']:
                    parameter.grad = self._gradients['gradients'][name].to(parameter)
        self._random = self._gradients = None

    def before_val(self, runner: Runner) -> None:
        self._before_val = random_state()

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        if self._before_val is not None:
            set_random_state(self._before_val)
        self._before_val = None


def _seeded_samplers(loader: DataLoader) -> list:
    samplers = (loader.sampler, getattr(loader.batch_sampler, 'sampler', None))
    return [sampler for sampler in samplers if hasattr(sampler, 'seed')]


def _accumulative_counts(runner: Runner) -> int | None:
    """Iterations per update; None for the several optimizers of an OptimWrapperDict."""
    return getattr(runner.optim_wrapper, '_accumulative_counts', None)
