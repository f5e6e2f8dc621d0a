"""Pastes masks into their images, at full size or as COCO's run-length encoding (RLE), one mask at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmengine.structures import InstanceData
from pycocotools import mask as coco_mask
from torch import Tensor, nn

from slab_det.common.errors import DeploymentError, SlabDetError

MASK_FORMATS = ('full', 'rle')
# Number of pixels that are sampled at once; each takes 13 bytes.
BAND = 2**20
# Adjacent columns of a pasted mask: x and y of the first pixel, and the pixels (w, h), in the order of RLE.
Band = tuple[int, int, Tensor]


def check_mask_format(mask_format: str, error: type[SlabDetError]) -> None:
    """Raises ``error`` unless :func:`paste_masks` knows the format."""
    if mask_format not in MASK_FORMATS:
        raise error(f'masks={mask_format!r} is not one of {", ".join(MASK_FORMATS)}')


def paste_masks(
    probabilities: Tensor, boxes: Tensor, shape: Sequence[int], threshold: float, mask_format: str = 'full'
) -> Tensor | list[dict]:
    """Pastes masks into their image; the result equals mmdet's on a CPU bit by bit.

    Args:
        probabilities: Sigmoids of the mask logits, (n, 28, 28).
        boxes: Corners in the image of ``shape``, (n, 4), float32.
        shape: (H, W).
        threshold: Smallest probability of a pixel inside the mask.
        mask_format: 'full' or 'rle'.

    Returns:
        'full': (n, H, W), bool, on the device of the boxes. 'rle': a dict for each mask, as
        ``pycocotools.mask.encode`` returns it.
    """
    if mask_format == 'rle':
        probabilities, boxes = probabilities.cpu(), boxes.cpu()
    pasted = (_paste_bands(*pair, shape, threshold) for pair in zip(probabilities, boxes, strict=True))
    if mask_format == 'rle':
        return [_encode_bands(bands, *shape) for bands in pasted]
    masks = torch.zeros(len(boxes), *shape, dtype=torch.bool, device=boxes.device)
    for mask, bands in zip(masks, pasted, strict=True):
        for x, y, pixels in bands:
            mask.T[x : x + len(pixels), y : y + pixels.shape[1]] = pixels
    return masks


def enlarge_masks(
    logits: Tensor, stride: int, scale_factor: Sequence[float], shape: Sequence[int], threshold: float
) -> Tensor:
    """Enlarges masks of the padded image to their image, as RTMDet-Ins does.

    Args:
        logits: (n, h, w), of every ``stride``-th pixel of the padded image.
        stride: See ``logits``.
        scale_factor: The factors of x and y from the image to the padded image.
        shape: (H, W) of the image.
        threshold: Largest probability of a pixel outside of the mask.

    Returns:
        (n, H, W), bool.
    """
    if not len(logits):
        return logits.new_zeros(0, *shape, dtype=torch.bool)
    logits = F.interpolate(logits[None], scale_factor=stride, mode='bilinear')
    # Rounded as in mmdet: the division comes first.
    sides = zip(logits.shape[2:], scale_factor[1::-1], strict=True)
    size = [math.ceil(side * (1 / factor)) for side, factor in sides]
    logits = F.interpolate(logits, size, mode='bilinear')[0, :, : shape[0], : shape[1]]
    return logits.sigmoid() > threshold


def _paste_bands(probability: Tensor, box: Tensor, shape: Sequence[int], threshold: float) -> Iterator[Band]:
    """Pastes one mask into the pixels that its box touches; yields some columns at a time."""
    left, top = (max(0, math.floor(low) - 1) for low in box[:2].tolist())
    right, bottom = (min(side, math.ceil(high) + 1) for side, high in zip(shape[::-1], box[2:].tolist(), strict=True))
    bottom = max(top, bottom)
    step = BAND // (bottom - top + 1) + 1
    y = _sample_points(top, bottom, box[1], box[3])
    for x in range(left, right, step):
        columns = _sample_points(x, min(x + step, right), box[0], box[2])
        grid = torch.stack(torch.meshgrid(columns, y, indexing='ij'), -1)
        pixels = F.grid_sample(probability[None, None].float(), grid[None], align_corners=False)[0, 0]
        yield x, top, pixels >= threshold


def _sample_points(start: int, end: int, low: Tensor, high: Tensor) -> Tensor:
    """Pixel centres on an axis where the box is -1 to 1; keeps mmdet's order of operations, so that all bits agree."""
    points = (torch.arange(start, end, device=low.device).float() + 0.5 - low) / (high - low) * 2 - 1
    return points.masked_fill(points.isinf(), 0)


def _encode_bands(bands: Iterable[Band], height: int, width: int) -> dict:
    """Encodes the bands as COCO RLE of a (height, width) mask, whose pixels outside of the bands are 0."""
    edges = [np.empty(0, int)]
    for x, y, pixels in bands:
        # A 0 above each column ends the runs of the column before.
        flat = np.pad(pixels.numpy(), ((0, 1), (1, 0))).ravel()
        column, row = divmod(np.flatnonzero(flat[1:] != flat[:-1]), pixels.shape[1] + 1)
        edges.append((x + column) * height + y + row)
    # A run that ends at the foot of a column and one that begins at the head of the next are one run: their two changes
    # have one index, and go.
    changes, times = np.unique(np.concatenate(edges), return_counts=True)
    changes = changes[(times == 1) & (changes < height * width)]
    counts = np.diff(changes, prepend=0, append=height * width)
    return coco_mask.frPyObjects(dict(size=[height, width], counts=counts), height, width)


def encode_masks(detector: nn.Module) -> None:
    """Makes a detector predict masks as RLE, in place: ``pred_instances.masks`` is then a list of dicts.

    Raises:
        DeploymentError: If the detector has no masks, or another head than mmdet's FCNMaskHead pastes them.
    """
    roi_head = getattr(detector, 'roi_head', None)
    heads = getattr(roi_head, 'mask_head', None)
    heads = [*heads] if isinstance(heads, nn.ModuleList) else [heads]
    pastes = FCNMaskHead._predict_by_feat_single
    if any(getattr(type(head), '_predict_by_feat_single', None) is not pastes for head in heads):
        found = 'no RoI head with masks' if None in heads else type(heads[-1]).__name__
        raise DeploymentError(
            f"masks='rle' needs what FCNMaskHead pastes, and {type(detector).__name__} has {found}; leave masks= out"
        )
    for head in heads:
        head._predict_by_feat_single = partial(_predict_encoded, head)
    roi_head.predict_mask = partial(_predict_lists, roi_head.predict_mask)


def _predict_encoded(
    head: FCNMaskHead,
    mask_preds: Tensor,
    bboxes: Tensor,
    labels: Tensor,
    img_meta: dict,
    rcnn_test_cfg: dict,
    rescale: bool = False,
    activate_map: bool = False,
) -> list[dict]:
    """Returns RLE dicts; replaces ``FCNMaskHead._predict_by_feat_single``, which returns all masks at full size."""
    scale, shape = bboxes.new_tensor(img_meta['scale_factor']), img_meta['ori_shape'][:2]
    if rescale:
        # In place, as mmdet does, because these are the boxes of the results.
        bboxes /= scale.repeat(2)
    else:
        shape = [round(side * factor) for side, factor in zip(shape, scale.flip(0).tolist(), strict=True)]
    probabilities = mask_preds if activate_map else mask_preds.sigmoid()
    probabilities = probabilities[range(len(bboxes)), 0 if head.class_agnostic else labels]
    return paste_masks(probabilities, bboxes, shape, rcnn_test_cfg.mask_thr_binary, 'rle')


def _predict_lists(predict_mask: Callable[..., list[InstanceData]], *args: Any, **options: Any) -> list[InstanceData]:
    """Calls ``predict_mask`` of a RoI head, and replaces its empty tensor for an image without objects by a list."""
    results = predict_mask(*args, **options)
    for found in results:
        found.masks = found.masks if len(found) else []
    return results
