"""What a process of a run notes for the tests; imported by the config of the command lines too."""

import hashlib
import json
from pathlib import Path

from mmengine.hooks import EMAHook, Hook
from mmengine.registry import HOOKS

from slab_det.norms import named_offline_norms, named_progressive_norms


def digest(tensors):
    """One word for the bytes of named tensors."""
    sha = hashlib.sha256()
    for name, value in sorted(dict(tensors).items()):
        sha.update(name.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()[:16]


class StepRecorder(Hook):
    """The model at the end of every iteration, at every validation and at the end of the run."""

    priority = 'LOWEST'

    def __init__(self):
        self.notes = {'gammas': [], 'parameters': [], 'norms': [], 'states': [], 'validated': []}

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        gammas = {norm.gamma for norm in named_progressive_norms(runner.model.module).values()}
        self.notes['gammas'].append(sorted(gammas))

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        model = runner.model.module
        norms = {
            f'{name}.{key}': value for name, norm in named_offline_norms(model) for key, value in norm.named_buffers()
        }
        self.notes['parameters'].append(digest(model.named_parameters()))
        self.notes['norms'].append(digest(norms))
        self.notes['states'].append(digest(model.state_dict()))

    def before_val_epoch(self, runner):
        self.notes['validated'].append(digest(runner.model.module.state_dict()))

    def after_train(self, runner):
        self.notes.update(
            end=digest(runner.model.module.state_dict()),
            ema=[digest(hook.ema_model.state_dict()) for hook in runner.hooks if isinstance(hook, EMAHook)],
            wrapper=type(runner.model).__name__,
            find_unused=runner.model.find_unused_parameters,
            lr=runner.optim_wrapper.param_groups[0].get('initial_lr'),
        )
        Path(runner.work_dir, 'notes.json').write_text(json.dumps(self.notes))


HOOKS.register_module(module=StepRecorder)
