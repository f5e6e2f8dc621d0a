"""ExactResumeHook: a resumed run goes on with the random numbers of the interrupted one."""

import random

import numpy as np
import pytest
import torch
from conftest import StopAfter, differing
from mmengine.hooks import Hook
from regression import Regression, train

from slab_det.hooks import ExactResumeHook


class Noisy(Regression):
    """Draws from every generator in training, as RoI sampling, drop-path and augmentation do, and in validation."""

    def forward(self, x, target, mode='tensor'):
        return super().forward(x + random.random() + np.random.randn() + torch.rand(()), target, mode)


def run(work_dir, *hooks, **options):
    return train(work_dir, [*hooks, ExactResumeHook()], Noisy, val=True, interval=2, **options).model


@pytest.mark.parametrize('options', [{}, dict(by_epoch=True), dict(accumulate=2)])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_last_bit(tmp_path, options):
    whole = run(tmp_path / 'whole', **options)
    # The checkpoint is followed by a validation, which draws, and by one more iteration, which is lost.
    run(tmp_path / 'cut', StopAfter(5), **options)
    assert not differing(run(tmp_path / 'cut', resume=True, **options), whole)


def test_the_order_of_images_goes_on_where_no_seed_was_given(tmp_path):
    """mmengine builds the sampler before it reads the seed of the checkpoint."""
    seen = []

    class Recorder(Hook):
        def before_train_iter(self, runner, batch_idx, data_batch=None):
            seen.append(data_batch[0][:, 0, 0].tolist())

    run(tmp_path, Recorder(), StopAfter(5), seed=None)
    first = list(seen)
    seen.clear()
    run(tmp_path, Recorder(), resume=True, seed=None)
    assert seen[0] == first[4] and len(seen) == 6
    # Five rounds of 8 images, each image once in each.
    together = sum(first[:4] + seen, [])
    rounds = [set(together[start : start + 8]) for start in range(0, 40, 8)]
    assert all(images == rounds[0] and len(images) == 8 for images in rounds)
