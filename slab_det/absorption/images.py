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
from slab_det.recalibration.moments import one_pass, prepare_inputs
from slab_det.runtime.errors import ConversionError

# Every fifth batch is held out: it chooses ridges and measures what is left.
HELD_OUT = 5


class Batches(list):
    """Batches of one pass over a data loader: another pass may draw other images.

    Attributes:
        dataset: The dataset of the loader, or None; it says how batches are prepared.
    """

    dataset: object = None


class Images(NamedTuple):
    """The images of an absorption.

    Attributes:
        store: Has the image tensor of each batch, by its index.
        count: How many batches there are.
        held_out: Every fifth batch, or all where there are fewer than five, as the loader yielded them.
        digest: Digest of the image tensors.
    """

    store: TensorStore
    count: int
    held_out: Batches
    digest: hashlib._Hash


def is_held_out(index: int) -> bool:
    """Whether no fit sees the batch of this index."""
    return index % HELD_OUT == HELD_OUT - 1


def read_images(model: nn.Module, batches: Iterable, folder: Path) -> Images:
    """Reads and stores the images of an absorption.

    Args:
        model: The teacher, which prepares them.
        batches: What a data loader yields, or image tensors (B, 3, H, W).
        folder: For image tensors that do not fit into memory.

    Raises:
        ConversionError: If there is no batch.
    """
    store, digest, count = TensorStore(folder, next(model.parameters()).device), hashlib.sha256(), 0
    first, held_out = [], Batches()
    held_out.dataset = getattr(batches, 'dataset', None)
    prepare = prepare_inputs(model, batches)
    for index, batch in enumerate(one_pass(batches)):
        inputs = prepare(batch)[0]
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
            f'{count} batches: none is held out, so agreement and what norms leave are measured on images '
            f'that were fitted; give at least {HELD_OUT} batches, smaller ones or more'
        )
    return Images(store, count, held_out, digest)


def to_bytes(tensor: Tensor) -> bytes:
    """The values, for a digest."""
    return tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
