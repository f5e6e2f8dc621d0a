"""Reads and stores the images of an absorption."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from mmengine.logging import MMLogger
from torch import Tensor, nn

from slab_det.absorption.walk import TensorStore
from slab_det.families import find_absorbed
from slab_det.families.regions import Regions
from slab_det.runtime.batches import one_pass, prepare_inputs
from slab_det.runtime.errors import ConversionError

# Every fifth batch is held out: it chooses the ridges and measures the errors of the fits.
HELD_OUT = 5


class Batches(list):
    """A list of batches from one pass over a data loader, since a second pass may draw other images.

    Attributes:
        dataset: The dataset of the loader, or None; it decides how batches are prepared.
    """

    dataset: object = None


class Images(NamedTuple):
    """The images of an absorption.

    Attributes:
        store: The image tensor of each batch, by the index of the batch.
        count: Number of batches.
        held_out: Every fifth batch, as the loader yielded it; all batches where there are fewer than five.
        digest: Digest of the image tensors.
        regions: The regions of each batch at which heads run; empty if they are not needed.
    """

    store: TensorStore
    count: int
    held_out: Batches
    digest: hashlib._Hash
    regions: list[Regions]


def is_held_out(index: int) -> bool:
    """Whether the batch with this index is held out from all fits."""
    return index % HELD_OUT == HELD_OUT - 1


def read_images(model: nn.Module, batches: Iterable, folder: Path, heads: bool = False) -> Images:
    """Reads and stores the images of an absorption.

    Args:
        model: The teacher, which prepares them.
        batches: What a data loader yields, or image tensors (B, 3, H, W).
        folder: Takes the image tensors that do not fit into memory.
        heads: Whether heads will run; see :func:`~slab_det.families.find_absorbed`.

    Raises:
        ConversionError: If there is no batch.
    """
    store, digest, count = TensorStore(folder, next(model.parameters()).device), hashlib.sha256(), 0
    first, held_out, regions = [], Batches(), []
    held_out.dataset = getattr(batches, 'dataset', None)
    prepare = prepare_inputs(model, batches)
    for index, batch in enumerate(one_pass(batches)):
        inputs, samples = prepare(batch)
        if heads:
            regions.append(find_absorbed(model).find_regions(model, inputs, samples))
        store.put(str(index), inputs)
        digest.update(to_bytes(inputs))
        count = index + 1
        if is_held_out(index):
            held_out.append(batch)
        elif index < HELD_OUT:
            first.append(batch)
    if not count:
        raise ConversionError('there was no batch of images; check the dataset and its filter_cfg')
    if not held_out:
        held_out.extend(first)
        MMLogger.get_current_instance().warning(
            f'{count} batches: none is held out, so agreement and errors are measured on images that were fitted; '
            f'give at least {HELD_OUT} batches: a smaller batch size or more images'
        )
    return Images(store, count, held_out, digest, regions)


def to_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor, for a digest."""
    return tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
