"""ExactResumeHook: a resumed run goes on with the random numbers and gradients of the interrupted one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from conftest import StopAfter
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import Dataset


class Noisy(BaseModel):
    """Draws from every generator in training, as RoI sampling, drop-path and augmentation do, and in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x, mode='tensor'):
        noise = random.random() + np.random.randn() + torch.rand(())
        return {'loss': (self.linear(torch.stack(x)) - noise).square().mean()} if mode == 'loss' else [x]


class Points(Dataset):
    metainfo = {}

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {'x': torch.full((2,), float(index)) + np.random.rand()}


class Nothing(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results.append(1)

    def compute_metrics(self, results):
        return {'count': len(results)}


def train(work_dir, by_epoch=False, hooks=(), resume=False, seed=5, with_hook=True, accumulate=1):
    torch.manual_seed(0)
    sampler = dict(type='DefaultSampler', shuffle=True) if by_epoch else dict(type='InfiniteSampler')
    length = dict(by_epoch=True, max_epochs=3) if by_epoch else dict(by_epoch=False, max_iters=8, val_interval=4)
    loader = dict(batch_size=4, num_workers=0, dataset=Points())
    runner = Runner(
        Noisy(),
        str(work_dir),
        resume=resume,
        train_dataloader=dict(**loader, sampler=sampler),
        val_dataloader=dict(**loader, sampler=dict(type='DefaultSampler', shuffle=False)),
        val_evaluator=[Nothing()],
        val_cfg={},
        train_cfg=length,
        optim_wrapper=dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.001), accumulative_counts=accumulate),
        default_hooks=dict(
            checkpoint=dict(
                type='CheckpointHook',
                interval=1 if by_epoch else 4,
                by_epoch=by_epoch,
                save_best='count',
                rule='greater',
            )
        ),
        custom_hooks=[*hooks, *([dict(type='ExactResumeHook')] if with_hook else [])],
        randomness=dict(seed=seed),
        default_scope='mmengine',
        experiment_name=f'{work_dir.name}-{np.random.rand()}',
    )
    try:
        runner.train()
    except KeyboardInterrupt:
        pass
    return runner.model.state_dict()['linear.weight']


@pytest.mark.parametrize('options', [{}, dict(by_epoch=True), dict(accumulate=3)])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(tmp_path, options):
    # The checkpoint is followed by a validation, which draws, and by one more iteration, which is lost.
    expected = train(tmp_path / 'whole', **options)
    train(tmp_path / 'cut', hooks=[StopAfter(5)], **options)
    saved = [torch.load(path, weights_only=False) for path in (tmp_path / 'cut').glob('[ie]*_[0-9].pth')]
    assert any('accumulated_gradients' in checkpoint for checkpoint in saved) == ('accumulate' in options)
    assert torch.equal(train(tmp_path / 'cut', resume=True, **options), expected)


def test_without_the_hook_it_is_not_and_its_checkpoints_resume_with_the_hook(tmp_path):
    expected = train(tmp_path / 'whole', with_hook=False)
    train(tmp_path / 'cut', hooks=[StopAfter(5)], with_hook=False)
    assert not torch.equal(train(tmp_path / 'cut', resume=True), expected)


def test_the_order_of_images_goes_on_where_no_seed_was_given(tmp_path):
    """mmengine builds the sampler before it reads the seed of the checkpoint."""
    seen = []

    class Recorder(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            seen.append([int(x[0]) for x in data_batch['x']])

    train(tmp_path, hooks=[Recorder(), StopAfter(5)], seed=None)
    first = list(seen)
    seen.clear()
    train(tmp_path, hooks=[Recorder()], resume=True, seed=None)
    assert seen[0] == first[4] and len(seen) == 4
    # Two rounds of 16 images, each image once in each.
    together = sum(first[:4] + seen, [])
    assert sorted(together[:16]) == sorted(together[16:]) == list(range(16))
