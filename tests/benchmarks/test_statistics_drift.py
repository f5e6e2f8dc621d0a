"""StatisticsDriftHook of the norm studies in a real run of a small Mask R-CNN on generated images."""

import itertools

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner

from benchmarks.norms.drift import StatisticsDriftHook


class Keep(Hook):
    """Keeps copies of all running statistics, from before the first iteration and from after each."""

    def before_train(self, runner):
        self.kept = [self.copies(runner.model)]

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.kept.append(self.copies(runner.model))

    @staticmethod
    def copies(model):
        state = model.state_dict()
        return [
            torch.cat([value.double() for key, value in state.items() if key.endswith(end)] or [torch.empty(0)])
            for end in ('running_mean', 'running_var')
        ]


@pytest.fixture
def logged(small_run_cfg):
    """The logged values of 4 iterations, of which LoggerHook logs every second, and what was kept beside them."""

    def run(name, norm_cfg):
        cfg = small_run_cfg(name, 4, norm_cfg=norm_cfg)
        cfg.default_hooks.logger.interval = 2
        cfg.custom_hooks = []
        cfg.update(val_dataloader=None, val_cfg=None, val_evaluator=None)
        runner, keep = Runner.from_cfg(cfg), Keep()
        runner.register_hook(StatisticsDriftHook())
        runner.register_hook(keep)
        runner.train()
        scalars = runner.message_hub.log_scalars
        return keep, {key: list(scalars[key].data[0]) for key in scalars if 'drift' in key}

    return run


def test_it_logs_by_how_much_statistics_moved_between_two_logs(logged):
    keep, values = logged('prepbn', dict(type='PRepBN'))
    kept = keep.kept[::2]
    assert len(kept) == 3
    for index, ((mean, var), (new_mean, new_var)) in enumerate(itertools.pairwise(kept)):
        assert (
            values['train/drift_mean'][index]
            == pytest.approx(((new_mean - mean).abs() / (var + 1e-5).sqrt()).mean().item(), rel=1e-6)
            != 0
        )
        assert (
            values['train/drift_log_var'][index]
            == pytest.approx(((new_var + 1e-5).log() - (var + 1e-5).log()).abs().mean().item(), rel=1e-6)
            != 0
        )
    assert {len(found) for found in values.values()} == {2} and len(values) == 2


def test_layer_norm_has_none(logged):
    _, values = logged('ln', dict(type='LN'))
    assert values == {}
