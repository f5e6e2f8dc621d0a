"""What a process of a run that the command lines started notes for the tests; imported by its config."""

import hashlib
import json
from pathlib import Path

from mmengine.hooks import Hook
from mmengine.registry import HOOKS


def digest(tensors):
    """One word for the bytes of named tensors."""
    sha = hashlib.sha256()
    for name, value in sorted(dict(tensors).items()):
        sha.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


class StepRecorder(Hook):
    """State at the end of every iteration, at every validation and at the end of the run."""

    priority = 'LOWEST'

    def __init__(self):
        self.notes = {'gammas': [], 'parameters': [], 'buffers': [], 'validated': []}

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.notes['gammas'].append(sorted({norm.gamma for norm in self.norms(runner)}))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        model = runner.model.module
        self.notes['parameters'].append(digest(model.named_parameters()))
        self.notes['buffers'].append(digest(model.named_buffers()))

    def before_val_epoch(self, runner):
        self.notes['validated'].append(digest(runner.model.module.state_dict()))

    def after_train(self, runner):
        self.notes.update(
            end=digest(runner.model.module.state_dict()),
            gamma=max(norm.gamma for norm in self.norms(runner)),
            wrapper=type(runner.model).__name__,
            find_unused=runner.model.find_unused_parameters,
            lr=runner.optim_wrapper.param_groups[0]['initial_lr'],
        )
        Path(runner.work_dir, 'notes.json').write_text(json.dumps(self.notes))

    @staticmethod
    def norms(runner):
        return [module for module in runner.model.modules() if hasattr(module, 'gamma')]


HOOKS.register_module(module=StepRecorder)
