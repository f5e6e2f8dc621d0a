"""Loads images to recalibrate or absorb on, as training saw them or as inference sees them."""

from __future__ import annotations

import copy
from pathlib import Path

from mmdet.registry import DATASETS
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.logging import MMLogger
from mmengine.runner import Runner
from torch.utils.data import DataLoader, Dataset

from slab_det.common.config import type_name, walk_datasets
from slab_det.common.errors import DataError
from slab_det.common.pipeline import find_test_pipeline
from slab_det.common.random_state import fixed_random_state
from slab_det.runtime.registries import enter_scope

PIPELINES = ('train', 'test')


def recalibration_dataloader(cfg: Config, num_images: int, pipeline: str = 'train') -> DataLoader:
    """Returns a loader of training images, which are the same in every pass over it.

    Args:
        cfg: A config with ``train_dataloader``, and for the pipeline 'test' ``test_dataloader`` or ``val_dataloader``.
        num_images: The number of images, evenly spaced over the training set; all images of a smaller set.
        pipeline: 'train': as training saw them, augmented and in batches of the training's size, padded to the largest
            image of each; a hook that switches the pipeline during training, as RTMDet's, is not followed. 'test': as
            inference sees them, one by one, without augmentation or batch padding.

    Raises:
        DataError: If there is no test-time pipeline to take, no training set, or ``num_images`` is below 1.
        ValueError: For an unknown pipeline.
    """
    if pipeline not in PIPELINES:
        raise ValueError(f"pipeline='{pipeline}' must be one of {', '.join(PIPELINES)}")
    if not cfg.get('train_dataloader'):
        raise DataError(
            'training images are needed, and the config has no train_dataloader; give the one that the detector was '
            'trained with, or --images DIR to the commands that take it'
        )
    train = cfg.train_dataloader
    dataset, batching = copy.deepcopy(train.dataset), dict(batch_size=1)
    while type_name(dataset['type']) == 'RepeatDataset':
        # Evenly spaced indices of a repeated dataset could give the same few images.
        dataset = dataset['dataset']
    if pipeline == 'test':
        steps = find_test_pipeline(cfg)
        for part in walk_datasets(dataset):
            is_wrapper = 'dataset' in part or 'datasets' in part
            # Wrappers that mix images have a pipeline of their own, which must not change test images.
            if 'pipeline' in part or not is_wrapper:
                part['pipeline'] = [] if is_wrapper else steps
    else:
        # Images are padded to the largest image of their batch, so batches must be as in training.
        batching = {key: copy.deepcopy(train[key]) for key in ('batch_size', 'batch_sampler') if train.get(key)}
        batching.get('batch_sampler', {}).pop('drop_last', None)
    # Names of transforms are looked up in the default scope, which only a runner would set.
    enter_scope(cfg)
    dataset = DATASETS.build(dataset)
    return Runner.build_dataloader(
        dict(
            **batching,
            dataset=RepeatableImages(dataset, num_images, test_mode=pipeline == 'test'),
            # A worker begins each pass with a fresh copy of the transforms, some of which have generators or caches of
            # their own (Albu, CachedMosaic).
            num_workers=max(train.get('num_workers', 0), int(pipeline == 'train')),
            # Shuffled: images of one kind may follow each other in a dataset.
            sampler=dict(type='DefaultSampler', shuffle=pipeline == 'train', round_up=False, seed=0),
            collate_fn=dict(type='pseudo_collate'),
        )
    )


def image_folder_dataloader(cfg: Config, folder: str | Path, num_images: int) -> DataLoader:
    """Loads the images of a folder as inference sees them, one by one, without annotations and unreadable images.

    Args:
        cfg: A config with ``test_dataloader`` or ``val_dataloader``, for the test-time pipeline.
        folder: A folder of images; its subfolders are searched too.
        num_images: The number of images, evenly spaced over the sorted names; all of a smaller folder.

    Raises:
        DataError: If there is no test-time pipeline to take, no readable image, or ``num_images`` is below 1.
    """
    # Imports mmdet's datasets, which takes seconds.
    from slab_det.data import ImageFolder

    enter_scope(cfg)
    images = RepeatableImages(ImageFolder(folder, find_test_pipeline(cfg)), num_images, test_mode=True)
    _leave_out_unreadable(images, folder)
    return DataLoader(images, batch_size=1, collate_fn=pseudo_collate)


def _leave_out_unreadable(images: RepeatableImages, folder: str | Path) -> None:
    """Leaves out, with a warning, the images that the pipeline cannot read; DataError if there are no others."""
    errors = {}
    for number in range(len(images)):
        try:
            images[number]
        except DataError as error:
            errors[number] = str(error)
    if not errors:
        return
    counted = f'{folder}: {len(errors)} of {len(images)} images cannot be used'
    if len(errors) == len(images):
        raise DataError(f'{counted}; the first: {errors[0]}')
    MMLogger.get_current_instance().warning('\n  '.join([f'{counted} and are left out:', *errors.values()]))
    images.indices = [index for number, index in enumerate(images.indices) if number not in errors]


class RepeatableImages(Dataset):
    """Images evenly spaced over a dataset, with the same random augmentation whenever they are read.

    Args:
        dataset: A dataset for training or testing.
        num_images: The number of images; all of a smaller dataset.
        test_mode: Whether the images are as inference sees them; :func:`slab_det.recalibrate` then pads none.
    """

    def __init__(self, dataset: Dataset, num_images: int, test_mode: bool) -> None:
        if num_images < 1:
            raise DataError(f'num_images={num_images}: at least one image is needed')
        step = max(len(dataset) / num_images, 1.0)
        self.indices = [int(i * step) for i in range(min(num_images, len(dataset)))]
        self.dataset, self.test_mode = dataset, test_mode

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict:
        with fixed_random_state(self.indices[index]):
            return self.dataset[self.indices[index]]

    def get_data_info(self, index: int) -> dict:
        """The annotations, which batch samplers ask for."""
        return self.dataset.get_data_info(self.indices[index])
