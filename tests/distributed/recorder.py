"""A hook that notes what each process of a run computes; the config of test_command_lines.py imports it."""

import hashlib
import json
from pathlib import Path

from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from slab_det.norms import named_progressive_norms


def digest(tensors):
    """One word for the bytes of named tensors."""
    sha = hashlib.sha256()
    for name, value in sorted(dict(tensors).items()):
        sha.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


class StepRecorder(Hook):
    """The model at the end of every iteration and of the run."""

    priority = 'LOWEST'

    def __init__(self):
        self.notes = {'gammas': [], 'parameters': [], 'states': []}

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        gammas = {norm.gamma for norm in named_progressive_norms(runner.model.module).values()}
        self.notes['gammas'].append(sorted(gammas))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        model = runner.model.module
        self.notes['parameters'].append(digest(model.named_parameters()))
        self.notes['states'].append(digest(model.state_dict()))

    def after_train(self, runner):
        self.notes.update(
            end=digest(runner.model.module.state_dict()),
            wrapper=type(runner.model).__name__,
            find_unused=runner.model.find_unused_parameters,
            lr=runner.optim_wrapper.param_groups[0].get('initial_lr'),
        )
        Path(runner.work_dir, 'notes.json').write_text(json.dumps(self.notes))


HOOKS.register_module(module=StepRecorder)
