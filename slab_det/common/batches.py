"""Checks batches of images that a user gives, and prepares them for a detector."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from mmdet.structures import DetDataSample
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from slab_det.common.errors import DataError


def check_batches(model: nn.Module, batches: object) -> None:
    """Raises DataError unless ``batches`` can be a data loader, a list, or batches of ``model`` stacked in a tensor."""
    stacked = isinstance(batches, Tensor) and (batches.ndim == 5 or _image_weight(model) is None)
    if isinstance(batches, (Tensor, np.ndarray)) and not stacked:
        name = f'one {type(batches).__name__} of shape {tuple(batches.shape)}'
        raise DataError(f'the images are {name}: give batches of images, as a data loader or as a list, [images]')
    if isinstance(batches, (str, bytes, Path, Mapping)) or not isinstance(batches, Iterable):
        raise DataError(
            f'the images are a {type(batches).__name__}: give a data loader, such as '
            'slab_det.recalibration.image_folder_dataloader makes, or a list of tensors (B, 3, H, W)'
        )


def check_batch(model: nn.Module, batch: object) -> None:
    """Raises DataError unless ``batch`` is what a data loader yields, or an image tensor that ``model`` can read."""
    if not isinstance(batch, Tensor):
        if not isinstance(batch, Mapping) or 'inputs' not in batch:
            raise DataError(
                f'a batch is a {type(batch).__name__}: give image tensors (B, 3, H, W), or what a data loader yields, '
                "a dict with 'inputs' and 'data_samples'"
            )
        if not hasattr(model, 'data_preprocessor'):
            raise DataError(
                f'a {type(model).__name__} has no data_preprocessor for the batches of a data loader; give image '
                'tensors (B, 3, H, W), or the whole detector'
            )
        return
    weight = _image_weight(model)
    if weight is None:
        return
    if batch.ndim != 4 or 0 in batch.shape:
        raise DataError(f'a batch of images has the shape (B, 3, H, W), not {tuple(batch.shape)}')
    if batch.shape[1] != weight.shape[1]:
        raise DataError(f'a batch of images has {batch.shape[1]} channels, and the model reads {weight.shape[1]}')
    if not batch.is_floating_point():
        raise DataError(f'a batch of images is normalised and in floating point, not {batch.dtype}')
    if batch.dtype != weight.dtype and not torch.is_autocast_enabled(weight.device.type):
        raise DataError(f'a batch of images is {batch.dtype}, and the model {weight.dtype}; give batch.to(...)')


def _image_weight(model: nn.Module) -> Tensor | None:
    """The weight of the convolution that reads the image, where it is the first layer; None in other models."""
    parts = getattr(model, 'backbone', model).modules()
    first = next((part for part in parts if [*part.parameters(recurse=False)] and not [*part.children()]), None)
    return first.weight if isinstance(first, nn.Conv2d) and first.in_channels <= 4 and first.groups == 1 else None


def one_pass(batches: Iterable) -> Iterable:
    """Fixes one epoch of a loader: every pass over the result reads the same batches in the same order.

    The loader of a config that counts iterations never ends, and other loaders shuffle every pass. Anything but a
    DataLoader is returned as it is.

    Raises:
        DataError: If the loader's dataset has no order that could be fixed, as an IterableDataset has none.
    """
    if not isinstance(batches, DataLoader):
        return batches
    if isinstance(batches.dataset, IterableDataset):
        raise DataError('an IterableDataset may yield other images in every pass; give a list of batches: [*loader]')
    order = [*islice(batches.batch_sampler or batches.sampler, len(batches))]
    # A loader with batch_size=None has a dataset of batches.
    order = dict(batch_sampler=order) if batches.batch_sampler else dict(sampler=order, batch_size=None)
    return DataLoader(
        batches.dataset,
        **order,
        num_workers=batches.num_workers,
        collate_fn=batches.collate_fn,
        worker_init_fn=batches.worker_init_fn,
    )


def prepare_inputs(model: nn.Module, batches: Iterable) -> Callable[[object], tuple[Tensor, list[DetDataSample]]]:
    """Returns a function that turns one of ``batches`` into images (B, 3, H, W) and data samples for a detector.

    Batches of a data loader are prepared as ``test_step`` does, and padded to the fixed size of the training unless the
    loader's dataset has ``test_mode``. Image tensors (B, 3, H, W) are taken as they are, without padding.

    Raises:
        DataError: If ``batches`` or, when the function is called, a batch is something else, or does not fit the model.
    """
    check_batches(model, batches)
    # mmdet's models take a second to import, and registering the hooks does not need them.
    from mmdet.models import BatchFixedSizePad

    # Other batch augmentations are left out: they are random, and every pass must see the same images.
    parts = () if getattr(getattr(batches, 'dataset', None), 'test_mode', False) else model.modules()
    pads = [part for part in parts if isinstance(part, BatchFixedSizePad)]

    def prepare(batch: object) -> tuple[Tensor, list[DetDataSample]]:
        check_batch(model, batch)
        if isinstance(batch, Tensor):
            shapes = dict.fromkeys(('img_shape', 'ori_shape', 'pad_shape', 'batch_input_shape'), batch.shape[-2:])
            batch = batch.to(next(model.parameters()).device)
            return batch, [DetDataSample(metainfo=dict(shapes, scale_factor=(1.0, 1.0))) for _ in batch]
        data = model.data_preprocessor(batch, False)
        inputs, samples = data['inputs'], data['data_samples']
        for pad in pads:
            inputs, samples = pad(inputs, samples)
        for sample in samples or ():
            # Heads divide boxes by it, and training pipelines without Resize do not set it.
            sample.set_metainfo(dict(scale_factor=sample.get('scale_factor', (1.0, 1.0))))
        return inputs, samples

    return prepare
