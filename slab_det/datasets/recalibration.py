"""Training images as inference sees them: the data of a recalibration."""
from __future__ import annotations

import copy

from mmdet.registry import DATASETS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from torch.utils.data import DataLoader, Subset

from slab_det.errors import DataError


def recalibration_dataloader(cfg: Config, num_images: int) -> DataLoader:
    """Images of the training set through the test-time pipeline, one by one: without augmentation or batch padding.

    Args:
        cfg: A config with ``train_dataloader`` and ``test_dataloader`` or ``val_dataloader``.
        num_images: How many images, evenly spaced over the training set; all of a smaller one.

    Raises:
        DataError: If there is no test-time pipeline to take, no training set or an empty one, or ``num_images``
            is below 1.
    """
    if num_images < 1:
        raise DataError(f'num_images={num_images}: at least one training image is needed')
    test_loader = cfg.get('test_dataloader') or cfg.get('val_dataloader')
    if not test_loader:
        raise DataError('recalibration needs the test-time pipeline of test_dataloader or val_dataloader')
    if not cfg.get('train_dataloader'):
        raise DataError('recalibration needs training images, and the config has no train_dataloader; '
                        'give the one that the detector was trained with')
    # Outside a runner nobody has set it, and transforms are found by it.
    init_default_scope(cfg.get('default_scope', 'mmdet'))
    dataset_cfg = _with_pipeline(copy.deepcopy(cfg.train_dataloader.dataset), _innermost(test_loader.dataset).pipeline)
    dataset = DATASETS.build(dataset_cfg)
    if hasattr(dataset, 'full_init'):
        dataset.full_init()
    if not len(dataset):
        raise DataError('the training set is empty after filtering; check ann_file, metainfo and filter_cfg')
    indices = evenly_spaced(len(dataset), num_images)
    return Runner.build_dataloader(dict(
        dataset=Subset(dataset, indices), batch_size=1, num_workers=cfg.train_dataloader.get('num_workers', 0),
        # Without a seed, which it does not need, it would wait for all processes.
        sampler=dict(type='DefaultSampler', shuffle=False, round_up=False, seed=0),
        collate_fn=dict(type='pseudo_collate')))


def evenly_spaced(length: int, count: int) -> list[int]:
    """``count`` indices over a sequence of ``length``, from 0 on; all of a shorter one."""
    step = max(length / count, 1.0)
    return [int(i * step) for i in range(min(count, length))]


def _innermost(dataset: dict) -> dict:
    while 'dataset' in dataset or 'datasets' in dataset:
        dataset = dataset['dataset'] if 'dataset' in dataset else dataset['datasets'][0]
    return dataset


def _with_pipeline(dataset: dict, pipeline: list) -> dict:
    """The dataset with this pipeline at its root; a wrapper that mixes images is taken off."""
    if dataset['type'] == 'MultiImageMixDataset':
        return _with_pipeline(dataset['dataset'], pipeline)
    if 'dataset' in dataset:
        dataset['dataset'] = _with_pipeline(dataset['dataset'], pipeline)
    elif 'datasets' in dataset:
        dataset['datasets'] = [_with_pipeline(part, pipeline) for part in dataset['datasets']]
    else:
        dataset['pipeline'] = pipeline
    return dataset
