"""The images of a recalibration: as inference sees them, or as training did."""
import random

import numpy as np
import pytest
import torch
from conftest import CONFIGS
from mmengine.config import Config

from slab_det.datasets import generate, set_data_root
from slab_det.datasets.recalibration import configured_pipeline, evenly_spaced, recalibration_dataloader
from slab_det.hooks import ExcludePaddingHook
from slab_det.random_state import fixed_random_state


@pytest.fixture
def cfg(tmp_path):
    """Images of 96x80, enlarged to several sizes, tested at one."""
    generate(tmp_path / 'data', num_train=12, num_val=2, size=(96, 80))
    cfg = Config.fromfile(CONFIGS / 'quickstart_mask_rcnn_slab_swin.py')
    set_data_root(cfg, tmp_path / 'data')
    cfg.train_dataloader.dataset.pipeline = [
        dict(type='LoadImageFromFile'),
        dict(type='LoadAnnotations', with_bbox=True, with_mask=True),
        dict(type='RandomResize', scale=(192, 160), ratio_range=(0.5, 1.5), keep_ratio=True),
        dict(type='RandomFlip', prob=0.5),
        dict(type='PackDetInputs'),
    ]
    cfg.train_dataloader.update(batch_size=3, num_workers=0, persistent_workers=False)
    return cfg


def images_of(loader):
    return [[image.clone() for image in batch['inputs']] for batch in loader]


def ids_of(loader):
    return [[sample.img_id for sample in batch['data_samples']] for batch in loader]


def test_training_images_are_augmented_and_batched_as_in_training_and_alike_in_every_pass(cfg):
    loader = recalibration_dataloader(cfg, 10, 'train')
    first = images_of(loader)
    assert [len(batch) for batch in first] == [3, 3, 3, 1]
    assert len({image.shape for batch in first for image in batch}) > 3
    random.random(), np.random.rand(), torch.rand(1)
    for batch, again in zip(first, images_of(loader), strict=True):
        assert all(map(torch.equal, batch, again))
    # In workers too, which have generators of their own.
    cfg.train_dataloader.num_workers = 2
    for batch, again in zip(first, images_of(recalibration_dataloader(cfg, 10, 'train')), strict=True):
        assert all(map(torch.equal, batch, again))
    ids = sum(ids_of(loader), [])
    # Mixed: neighbours of a dataset need not share a batch.
    assert len({*ids}) == 10 and ids != sorted(ids)


def test_test_images_are_neither_augmented_nor_padded_to_each_other(cfg):
    loader = recalibration_dataloader(cfg, 10)
    images = images_of(loader)
    assert [len(batch) for batch in images] == [1] * 10
    assert len({image.shape for image, in images}) == 1
    assert sum(ids_of(loader), []) == [1 + index for index in evenly_spaced(12, 10)]


@pytest.mark.parametrize('as_type', [False, True])
def test_without_padding_in_the_statistics_images_come_one_by_one(cfg, as_type):
    batches = images_of(recalibration_dataloader(cfg, 6, 'train'))
    cfg.custom_hooks.append(dict(type=ExcludePaddingHook if as_type else 'ExcludePaddingHook'))
    alone = images_of(recalibration_dataloader(cfg, 6, 'train'))
    assert [len(batch) for batch in alone] == [1] * 6
    # The same images, augmented alike.
    assert all(map(torch.equal, sum(batches, []), sum(alone, [])))


def test_images_share_batches_as_the_batch_sampler_of_training_has_it(cfg):
    cfg.train_dataloader.batch_sampler = dict(type='AspectRatioBatchSampler')
    loader = recalibration_dataloader(cfg, 12, 'train')
    assert type(loader.batch_sampler).__name__ == 'AspectRatioBatchSampler'
    assert [len(batch) for batch in images_of(loader)] == [3] * 4


def test_the_pipeline_of_a_config_is_that_of_its_hook(cfg):
    assert configured_pipeline(cfg) == configured_pipeline(Config()) == 'test'
    cfg.custom_hooks[1].pipeline = 'train'
    assert configured_pipeline(cfg) == 'train'


def test_an_unknown_pipeline_is_refused(cfg):
    with pytest.raises(ValueError, match="pipeline='val' must be one of test, train"):
        recalibration_dataloader(cfg, 4, 'val')


def test_a_fixed_state_leaves_the_generators_alone():
    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()

    with fixed_random_state(3):
        fixed = draw()
    with fixed_random_state(1):
        expected = draw(), draw()
    with fixed_random_state(1):
        first = draw()
        with pytest.raises(RuntimeError), fixed_random_state(3):
            assert draw() == fixed
            raise RuntimeError
        assert (first, draw()) == expected
