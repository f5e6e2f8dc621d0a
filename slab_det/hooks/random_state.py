"""RandomStateHook: a resumed run draws the random numbers that the interrupted one would have drawn."""

from __future__ import annotations

import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from slab_det.runtime.random_state import random_state, set_random_state


@HOOKS.register_module()
class RandomStateHook(Hook):
    """Saves the state of all random generators in checkpoints and restores it on ``--resume``.

    RoI sampling, drop-path and augmentation draw from them, and mmengine starts them anew. With it and
    ``num_workers=0``, in one process on a CPU, an interrupted and resumed run equals the uninterrupted one to the last
    bit. The order of images also goes on where the seed was not fixed by the config. What goes on with other draws, as
    good but not the same: augmentation in the workers of data loaders, and processes other than the first.

    Validation draws nothing: a run that is resumed right before it does without.
    """

    # What other hooks draw must come first, and CheckpointHook (VERY_LOW) last.
    priority = 'LOW'

    def __init__(self) -> None:
        self._resumed: dict | None = None
        self._before_val: dict | None = None

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        checkpoint['random_state'] = {
            **random_state(),
            'sampler_seed': [sampler.seed for sampler in _seeded_samplers(runner.train_dataloader)],
        }

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        self._resumed = checkpoint.get('random_state') if runner._resume else None
        if self._resumed is not None:
            samplers = _seeded_samplers(runner.train_dataloader)
            for sampler, seed in zip(samplers, self._resumed['sampler_seed'], strict=False):
                sampler.seed = seed

    def before_train(self, runner: Runner) -> None:
        # An iterator over a DataLoader draws a seed for its workers, in a resumed run once more than otherwise.
        runner.train_dataloader.generator = torch.Generator()
        # Of a checkpoint there is one for all processes, which should not draw alike.
        if self._resumed is not None and get_rank() == 0:
            set_random_state(self._resumed)
        self._resumed = None

    def before_val(self, runner: Runner) -> None:
        self._before_val = random_state()

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        if self._before_val is not None:
            set_random_state(self._before_val)
        self._before_val = None


def _seeded_samplers(loader: DataLoader) -> list:
    samplers = (loader.sampler, getattr(loader.batch_sampler, 'sampler', None))
    return [sampler for sampler in samplers if hasattr(sampler, 'seed')]
