"""A run that is interrupted and resumed ends as the uninterrupted one, to the last bit."""

import random

import numpy as np
import pytest
import torch
from conftest import StopAfter, differing
from mmengine.hooks import Hook
from regression import Regression, train

import slab_det
from slab_det.hooks import ExactResumeHook, NormStateHook, ProgressiveNormHook
from slab_det.norms import UN, PRepBN, TokenBN


class Noisy(Regression):
    """Draws from every generator in training, as RoI sampling, drop-path and augmentation do, and in validation."""

    def forward(self, x, target, mode='tensor'):
        return super().forward(x + random.random() + np.random.randn() + torch.rand(()), target, mode)


def run(work_dir, *hooks, norm=PRepBN, **options):
    ours = [NormStateHook(), ExactResumeHook(), *[ProgressiveNormHook()] * (norm is PRepBN)]
    return train(work_dir, [*hooks, *ours], lambda: Noisy(norm), val=True, interval=2, **options).model


def small_un(num_features):
    return UN(num_features, warmup_iters=2, window_size=2)


@pytest.mark.parametrize(
    ('start', 'options'),
    [
        (1, {}),
        (1, dict(by_epoch=True)),
        (1, dict(accumulate=3)),
        # The decay of a fine-tuning begins where its weights are.
        (0.6, {}),
        (1, dict(norm=TokenBN)),
        (1, dict(norm=small_un)),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, start, options):
    if start < 1:
        pretrained = Noisy()
        slab_det.set_gamma(pretrained, start)
        torch.save(dict(state_dict=pretrained.state_dict()), tmp_path / 'pretrained.pth')
        options = dict(load_from=str(tmp_path / 'pretrained.pth'))
    whole = run(tmp_path / 'whole', **options)
    # The checkpoint is followed by a validation, which draws, and by one more iteration, which is lost.
    run(tmp_path / 'cut', StopAfter(5), **options)
    options.pop('load_from', None)
    run(tmp_path / 'cut', StopAfter(9), resume=True, **options)
    saved = [torch.load(path, weights_only=False) for path in (tmp_path / 'cut').glob('[ie]*_[0-9].pth')]
    assert any('accumulated_gradients' in checkpoint for checkpoint in saved) == ('accumulate' in options)
    resumed = run(tmp_path / 'cut', resume=True, **options)
    assert not differing(resumed, whole)
    # norm_eval freezes statistics that count as loaded; those of the run itself are live.
    assert start < 1 or not any(norm.statistics_loaded for norm in resumed.norms)


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
