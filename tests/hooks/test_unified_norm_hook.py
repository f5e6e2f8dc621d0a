"""UnifiedNormHook in real runs of a small Mask R-CNN on generated images."""

import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.runner import Runner, set_random_seed
from torch import nn

from slab_det.hooks.unified_norm import UnifiedNormHook, filtered_share
from slab_det.norms import UN, named_quadratic_norms

NORM = dict(type='UN', warmup_iters=2, window_size=2)


class Watch(Hook):
    """Makes iterations repeatable, looks at the first output norm before the first one, stops after one."""

    priority = 'VERY_LOW'

    def __init__(self, stop_after=None):
        self.stop_after = stop_after

    def before_run(self, runner):
        # As the weights of a pretrained backbone may have it.
        runner.model.backbone.norm0.iteration.fill_(9)

    def before_train(self, runner):
        norm = runner.model.backbone.norm0
        self.iteration, self.running_var = int(norm.iteration), norm.running_var.clone()
        self.is_clear = not any(buffer.any() for name, buffer in norm.named_buffers() if name != 'running_var')

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        set_random_seed(runner.iter)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.stop_after:
            raise KeyboardInterrupt


@pytest.fixture
def run(small_run_cfg):
    def run(name, norm_cfg=NORM, stop_after=None, max_iters=2, **changes):
        cfg = small_run_cfg(name, max_iters, norm_cfg=norm_cfg)
        cfg.custom_hooks = [dict(type='UnifiedNormHook')]
        cfg.default_hooks.logger.interval = 4
        # mmengine restores the order of the images on resuming, not the flips.
        dataset = cfg.train_dataloader.dataset
        dataset.pipeline = [transform for transform in dataset.pipeline if transform.type != 'RandomFlip']
        cfg.update(val_dataloader=None, val_cfg=None, val_evaluator=None, randomness=dict(seed=0), **changes)
        cfg.experiment_name += f'-{len(changes)}'
        runner, watch = Runner.from_cfg(cfg), Watch(stop_after)
        runner.register_hook(watch)
        try:
            runner.train()
        except KeyboardInterrupt:
            pass
        return runner, watch, next(Path(runner.work_dir).glob('*/*.log')).read_text()

    return run


def test_a_resumed_run_ends_as_one_without_interruption_and_both_log_the_filter(run):
    whole, start, log = run('whole', max_iters=6)
    assert start.is_clear
    run('parts', max_iters=6, stop_after=4)
    resumed, start, _ = run('parts', max_iters=6, resume=True)
    assert start.iteration == 4
    state = resumed.model.state_dict()
    for key, value in whole.model.state_dict().items():
        assert torch.equal(state[key], value), key
    norms = list(named_quadratic_norms(whole.model).values())
    assert {int(norm.iteration) for norm in norms} == {int(norm.gradients.count) for norm in norms} == {6}

    # LoggerHook has interval 4; the epoch ends after 5, which it ignores. Of 6 iterations 4 came after the warm-up.
    assert len(re.findall(r'Iter\(train\).* un_filtered: \d', log)) == 1
    history, _ = whole.message_hub.get_scalar('train/un_filtered').data
    assert len(history) == 1
    share = sum(int(norm.num_filtered) / 4 for norm in norms) / len(norms)
    assert 0 < share < 1 and filtered_share(norms).item() == pytest.approx(share)


def test_fine_tuning_starts_with_a_warm_up_and_the_loaded_variance(run):
    pretrained, _, _ = run('pretrained')
    loaded = pretrained.model.backbone.norm0.running_var
    _, start, _ = run('tuned', load_from=str(Path(pretrained.work_dir) / 'iter_2.pth'))
    assert start.is_clear
    assert torch.equal(start.running_var, loaded) and not torch.equal(loaded, torch.ones_like(loaded))


def test_resume_without_a_checkpoint_to_resume_from_starts_with_a_warm_up(run):
    runner, start, log = run('new', dict(type='PowerNorm'), max_iters=1, resume=True)
    assert start.is_clear and runner.model.backbone.norm0.iteration == 1
    assert 'no UN, MABN or PowerNorm' not in log
    assert 'train/un_filtered' not in runner.message_hub.log_scalars, 'it has no filter'


def test_a_model_without_these_norms_gets_a_warning():
    runner = SimpleNamespace(model=nn.LayerNorm(3), hooks=[], logger=Mock())
    UnifiedNormHook().before_train(runner)
    runner.logger.warning.assert_called_once()
    assert 'no UN, MABN or PowerNorm' in runner.logger.warning.call_args.args[0]


def test_the_share_counts_iterations_after_the_warm_up():
    norms = [UN(3, warmup_iters=10), UN(3, warmup_iters=0), UN(3, warmup_iters=50)]
    for norm, fired in zip(norms, (5, 4, 0), strict=True):
        norm.iteration.fill_(20)
        norm.num_filtered.fill_(fired)
    assert filtered_share(norms).item() == pytest.approx((0.5 + 0.2 + 0) / 3)


def test_a_backbone_of_another_training_starts_with_a_warm_up_without_the_hook_too(run, small_run_cfg, tmp_path):
    """Its running variance comes along; resuming brings the state of this training back."""
    pretrained, _, _ = run('pretrained')
    path = tmp_path / 'backbone.pth'
    torch.save(dict(state_dict=pretrained.model.state_dict()), path)

    class Start(Hook):
        def before_train(self, runner):
            norm = runner.model.backbone.norm0
            self.iteration, self.running_var = int(norm.iteration), norm.running_var.clone()

    def go_on(**changes):
        cfg = small_run_cfg('tuned', 4, norm_cfg=NORM)
        cfg.model.backbone.init_cfg = dict(type='Pretrained', checkpoint=str(path))
        cfg.custom_hooks = [dict(type='CheckedLoadHook')]
        cfg.update(val_dataloader=None, val_cfg=None, val_evaluator=None, **changes)
        cfg.experiment_name += f'-{len(changes)}'
        runner, start = Runner.from_cfg(cfg), Start()
        runner.register_hook(start)
        runner.train()
        return runner, start

    _, start = go_on()
    assert start.iteration == 0
    assert torch.equal(start.running_var, pretrained.model.backbone.norm0.running_var)
    runner, start = go_on(resume=True)
    assert start.iteration == 4 == runner.model.backbone.norm0.iteration
