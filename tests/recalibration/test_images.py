"""The images of a recalibration: as inference sees them, or as training did."""

import random
import shutil

import numpy as np
import pytest
import torch
from conftest import CONFIGS
from mmdet.registry import MODELS
from mmengine.config import Config

import slab_det
from slab_det.common.errors import DataError
from slab_det.data import generate
from slab_det.preflight import set_data_root
from slab_det.recalibration import image_folder_dataloader, recalibration_dataloader


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
    loader = recalibration_dataloader(cfg, 10)
    first = images_of(loader)
    assert [len(batch) for batch in first] == [3, 3, 3, 1]
    assert len({image.shape for batch in first for image in batch}) > 3
    random.random(), np.random.rand(), torch.rand(1)
    for batch, again in zip(first, images_of(loader), strict=True):
        assert all(map(torch.equal, batch, again))
    # In workers too, which have generators of their own.
    cfg.train_dataloader.num_workers = 1
    for batch, again in zip(first, images_of(recalibration_dataloader(cfg, 10)), strict=True):
        assert all(map(torch.equal, batch, again))
    ids = sum(ids_of(loader), [])
    # Shuffled, so that neighbours of a dataset need not share a batch.
    assert len({*ids}) == 10 and ids != sorted(ids)


def test_test_images_are_neither_augmented_nor_padded_to_each_other(cfg):
    loader = recalibration_dataloader(cfg, 10, 'test')
    images = images_of(loader)
    assert [len(batch) for batch in images] == [1] * 10
    assert len({image.shape for (image,) in images}) == 1
    # Evenly spaced over the 12 images of the training set.
    assert sum(ids_of(loader), []) == [1, 2, 3, 4, 5, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    'augments, size',
    [
        ([dict(type='BatchFixedSizePad', size=(288, 320))], (288, 320)),
        # Left out: the sizes of BatchSyncRandomResize would differ from pass to pass.
        ([dict(type='BatchSyncRandomResize', random_size_range=(480, 800), interval=1)], (128, 160)),
    ],
)
def test_images_are_padded_to_the_fixed_size_of_the_training(cfg, small_detector_cfg, augments, size):
    cfg.train_dataloader.dataset.pipeline[2].ratio_range = (0.75, 0.75)
    model_cfg = small_detector_cfg()
    model_cfg.data_preprocessor.batch_augments = augments
    model = MODELS.build(model_cfg)
    seen = []
    model.backbone.register_forward_pre_hook(lambda _, args: seen.append(tuple(args[0].shape[-2:])))
    for pipeline in ('test', 'train'):
        loader = recalibration_dataloader(cfg, 3, pipeline)
        slab_det.recalibrate(model, loader, max_passes=1, progress=False)
    # 'test' gives three single images, 'train' one batch.
    assert seen == [(160, 192)] * 3 + [size]


def test_a_folder_of_pictures_goes_through_the_test_pipeline_without_annotations(cfg, tmp_path, small_detector):
    root = tmp_path / 'data'
    by_dataset = images_of(recalibration_dataloader(cfg, 6, 'test'))
    shutil.rmtree(root / 'annotations')
    (root / 'images/train/notes.txt').write_text('no picture')
    cfg.pop('train_dataloader'), cfg.pop('val_dataloader')
    cfg.test_dataloader.dataset = dict(type='RepeatDataset', times=2, dataset=cfg.test_dataloader.dataset)
    loader = image_folder_dataloader(cfg, root / 'images/train', 6)
    assert [[*map(torch.equal, *pair)] for pair in zip(images_of(loader), by_dataset, strict=True)] == [[True]] * 6
    assert len(image_folder_dataloader(cfg, root, 100)) == 14, 'its folders too'
    with torch.no_grad():
        (sample,) = small_detector('faster_rcnn').test_step(next(iter(loader)))
    assert sample.ori_shape == (80, 96)


def test_a_folder_without_pictures_or_with_broken_ones_is_named(cfg, tmp_path):
    (tmp_path / 'empty').mkdir()
    for folder, what in (('empty', 'holds no image'), ('none', 'is not a folder')):
        with pytest.raises(DataError, match=f'{folder} {what}'):
            image_folder_dataloader(cfg, tmp_path / folder, 4)
    (tmp_path / 'empty/broken.jpg').write_bytes(b'no JPEG')
    with pytest.raises(DataError, match=r'broken\.jpg cannot be read'):
        images_of(image_folder_dataloader(cfg, tmp_path / 'empty', 4))
