"""ExactResumeHook: a resumed run ends as it would have ended without the interruption."""

from __future__ import annotations

import torch
from mmengine.dist import all_gather_object, get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from slab_det.runtime.errors import SlabDetError
from slab_det.runtime.random_state import random_state, set_random_state


@HOOKS.register_module()
class ExactResumeHook(Hook):
    """Saves the state of all random generators in checkpoints, and restores it on ``--resume``.

    mmengine starts the generators anew, from which RoI sampling, drop-path and augmentation draw. With this hook and
    ``num_workers=0``, in one process on a CPU, an interrupted and resumed run equals the uninterrupted one to the last
    bit. Workers of data loaders and processes other than the first go on with other random numbers. The order of images
    goes on, also without a seed in the config. Validation leaves the generators as it found them, because mmengine
    leaves out a validation that was due where a run is resumed.

    Gradients are not saved: with ``accumulative_counts`` a run is exact if every checkpoint follows an update.

    If processes would start at different iterations, because only some of them see the checkpoint, all stop.
    """

    # Other hooks draw before this one saves; CheckpointHook (VERY_LOW) comes after.
    priority = 'LOW'

    def __init__(self) -> None:
        self._resumed: dict | None = None
        self._before_val: dict | None = None

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        seeds = [sampler.seed for sampler in _seeded_samplers(runner.train_dataloader)]
        checkpoint['random_state'] = {**random_state(), 'sampler_seed': seeds}

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self._resumed = checkpoint.get('random_state') if runner._resume else None
        if self._resumed is not None:
            samplers = _seeded_samplers(runner.train_dataloader)
            for sampler, seed in zip(samplers, self._resumed['sampler_seed'], strict=False):
                sampler.seed = seed

    def before_train(self, runner: Runner) -> None:
        starts = all_gather_object(runner.iter)
        if len(set(starts)) > 1:
            raise SlabDetError(
                f'the processes start at iterations {starts}: the checkpoint to resume from must be where each of them '
                'looks for it; copy it there, or name it with --resume'
            )
        # A DataLoader draws the seed of its workers from the global generator, in a resumed run once more than
        # otherwise. A generator of its own gives the workers of each process and of each start another seed.
        seed = runner.seed + runner.iter * get_world_size() + get_rank()
        runner.train_dataloader.generator = torch.Generator().manual_seed(seed)
        # The checkpoint has the state of the main process, and the others must not draw the same numbers.
        if self._resumed is not None and get_rank() == 0:
            set_random_state(self._resumed)

    def before_val(self, runner: Runner) -> None:
        self._before_val = random_state()

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        if self._before_val is not None:
            set_random_state(self._before_val)
        self._before_val = None


def _seeded_samplers(loader: DataLoader) -> list:
    samplers = (loader.sampler, getattr(loader.batch_sampler, 'sampler', None))
    return [sampler for sampler in samplers if hasattr(sampler, 'seed')]
