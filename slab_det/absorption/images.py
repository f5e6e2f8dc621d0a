"""Reads and stores the images of an absorption."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Sized
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import torch
from mmdet.structures import DetDataSample
from mmengine.logging import MMLogger
from torch import Tensor, nn

from slab_det.absorption.store import TensorStore
from slab_det.attention.base import MapAttention, ShiftedWindowAttention
from slab_det.common.batches import one_pass, prepare_inputs
from slab_det.common.errors import ConversionError
from slab_det.common.modules import changed_test_cfgs
from slab_det.families import find_absorbed
from slab_det.families.regions import Regions

# Every fifth batch is held out: it chooses the ridges and measures the errors of the fits.
NTH_HELD_OUT = 5
# The fits read at most MOST_IMAGES * CROP pixels, and the regions of MOST_IMAGES images: of more images a smaller part
# of each.
CROP = 448 * 672
MOST_IMAGES = 40
# Stands for the whole first batch among the indices of batches.
WHOLE = -1
# Side of a pixel of the coarsest stage of a backbone.
STRIDE = 32


class Images(NamedTuple):
    """The images of an absorption.

    Attributes:
        store: The image tensor of each batch, by the index of the batch: of a large image a crop. ``WHOLE`` is the
            index of the first batch without a crop, on which multiply-adds are counted.
        count: Number of batches.
        samples: For each batch, by its index, the data samples of its images as the store holds them.
        digest: Digest of the image tensors.
        regions: The regions of each batch at which heads run, by its index; empty if they are not needed.
        shares: The share of the pixels of each batch that the store holds, by its index.
    """

    store: TensorStore
    count: int
    samples: dict[int, list[DetDataSample]]
    digest: hashlib._Hash
    regions: dict[int, Regions]
    shares: dict[int, float]


def is_held_out(index: int) -> bool:
    """Whether the batch with this index is held out from all fits."""
    return index % NTH_HELD_OUT == NTH_HELD_OUT - 1


def read_images(model: nn.Module, batches: Iterable, folder: Path, heads: bool = False) -> Images:
    """Reads and stores the images of an absorption.

    Args:
        model: The teacher, which prepares them.
        batches: What a data loader yields, or image tensors (B, 3, H, W).
        folder: Takes the image tensors that do not fit into memory.
        heads: Whether heads will run, where :func:`~slab_det.families.find_absorbed` knows them.

    Raises:
        ConversionError: If there is no batch.
    """
    store, digest, count = TensorStore(folder, next(model.parameters()).device), hashlib.sha256(), 0
    stored, regions, shares = {}, {}, {}
    prepare, grid = prepare_inputs(model, batches), _crop_grid(model)
    batches = one_pass(batches)
    number = len(batches) if isinstance(batches, Sized) else 100
    family = find_absorbed(model) if heads else None
    for index, batch in enumerate(batches):
        inputs, samples = prepare(batch)
        share = MOST_IMAGES / number / len(inputs)
        if index == 0:
            store.put(str(WHOLE), inputs)
            if family:
                regions[WHOLE] = family.find_regions(model, inputs, samples, math.inf)
        pixels = inputs.numel()
        if grid and inputs.ndim == 4:
            inputs, samples = _crop(inputs, samples, share * CROP, grid, index)
        shares[index] = inputs.numel() / pixels
        if family:
            with fewer_objects(model, shares[index]):
                regions[index] = family.find_regions(model, inputs, samples, min(1.0, share))
        store.put(str(index), inputs)
        stored[index] = [_sample_like(sample) for sample in samples or ()]
        digest.update(to_bytes(inputs))
        count = index + 1
    if not count:
        raise ConversionError('there was no batch of images; check the dataset and its filter_cfg')
    if count < NTH_HELD_OUT:
        MMLogger.get_current_instance().warning(
            f'{count} batches: none is held out, so losses and errors are measured on images that were fitted; '
            f'give at least {NTH_HELD_OUT} batches: a smaller batch size or more images'
        )
    return Images(store, count, stored, digest, regions, shares)


def fewer_objects(model: nn.Module, share: float) -> AbstractContextManager[None]:
    """Within it a detector finds at most this share of the proposals and objects of an image: as many as fall on a crop
    that has this share of the pixels."""

    def lower(cfg: dict) -> dict:
        # -1 means no limit.
        return {'max_per_img': math.ceil(share * cfg['max_per_img'])} if cfg.get('max_per_img', -1) >= 0 else {}

    return changed_test_cfgs(model, lower)


def _sample_like(sample: DetDataSample) -> DetDataSample:
    """The sample of an image whose objects are wanted where they lie in the input, without annotations."""
    shape = dict(ori_shape=sample.img_shape, scale_factor=(1.0, 1.0)) if 'img_shape' in sample else {}
    return DetDataSample(metainfo={**sample.metainfo, **shape})


def _crop_grid(model: nn.Module) -> int:
    """The number of pixels on which the windows of every stage of a Swin begin; 0 for a backbone that must see whole
    images, because its attention or its positions span the map."""
    windows = [module.w_msa for module in model.modules() if isinstance(module, ShiftedWindowAttention)]
    is_global = any(isinstance(module, MapAttention) for module in model.modules())
    has_positions = getattr(getattr(model, 'backbone', model), 'absolute_pos_embed', None) is not None
    if not windows or is_global or has_positions:
        return 0
    widest = max(window.embed_dims for window in windows)
    # The width of a stage doubles with the side of its pixels.
    return math.lcm(*(window.window_size * STRIDE * window.embed_dims // widest for window in windows))


def _crop(
    images: Tensor, samples: list[DetDataSample], pixels: float, grid: int, seed: int
) -> tuple[Tensor, list[DetDataSample]]:
    """Crops images to about a number of pixels each, so that objects keep their size and windows their contents.

    Args:
        images: (B, 3, H, W).
        samples: One for each image.
        pixels: Number of pixels that suffice.
        grid: The sides and the corner of the crop are multiples of it, except at the border of the images.
        seed: Chooses the corner of the crop.
    """
    scale, generator, parts = math.sqrt(pixels / images[0, 0].numel()), random.Random(seed), []
    if scale >= 1:
        return images, samples
    for side in images.shape[-2:]:
        crop = grid * max(1, round(scale * side / grid))
        start = generator.randrange(0, max(1, side - crop + grid), grid)
        parts.append(slice(start, start + crop))
    crops = images[..., parts[0], parts[1]]
    shapes = dict.fromkeys(('img_shape', 'pad_shape', 'batch_input_shape'), tuple(crops.shape[-2:]))
    return crops, [DetDataSample(metainfo={**sample.metainfo, **shapes}) for sample in samples]


def to_bytes(tensor: Tensor) -> bytes:
    """The bytes of a tensor, for a digest."""
    return tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes()
