"""Detections: what a detector finds in an image, or in the mirrored image."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from mmdet.structures import DetDataSample
from mmdet.structures.mask import encode_mask_results
from pycocotools import mask as coco_mask
from torch import Tensor, nn

from slab_det.common.batches import one_pass, prepare_inputs
from slab_det.common.errors import ComparisonError
from slab_det.common.modules import evaluating


@dataclass(frozen=True)
class Detections:
    """The detections of one image, highest score first.

    Attributes:
        scores: (N,), in (0, 1].
        labels: Class of each detection, (N,).
        regions: Boxes (x, y, width, height), (N, 4), or N masks in COCO's run-length encoding.
    """

    scores: np.ndarray
    labels: np.ndarray
    regions: np.ndarray | list[dict]

    def select(self, indices: np.ndarray) -> Detections:
        """Returns the detections with these indices, in the order of the indices."""
        masks = isinstance(self.regions, list)
        regions = [self.regions[i] for i in indices] if masks else self.regions[indices]
        return Detections(self.scores[indices], self.labels[indices], regions)

    def mirror(self, width: int) -> Detections:
        """Returns the detections as they lie in the mirrored image, which is ``width`` pixels wide."""
        if isinstance(self.regions, list):
            # One by one: decoded, all masks of a large image are gigabytes.
            flipped = (np.asfortranarray(coco_mask.decode(mask)[:, ::-1]) for mask in self.regions)
            return Detections(self.scores, self.labels, [coco_mask.encode(mask) for mask in flipped])
        x, y, w, h = self.regions.T
        return Detections(self.scores, self.labels, np.stack([width - x - w, y, w, h], 1))


def detect(model: nn.Module, batches: Iterable, mirrored: bool = False) -> list[Detections]:
    """Runs a detector in eval mode and returns its detections.

    Args:
        model: A detector.
        batches: Batches of a data loader, or normalised images (B, 3, H, W).
        mirrored: Show the detector each image with left and right exchanged. The detections are mirrored back.

    Returns:
        The detections of each image, with masks if the detector has them, otherwise with boxes.

    Raises:
        ComparisonError: If there is no image, or ``model`` predicts no instances (such as a semantic segmentor).
    """
    return detect_prepared(model, map(prepare_inputs(model, batches), one_pass(batches)), mirrored)


@torch.no_grad()
def detect_prepared(
    model: nn.Module, batches: Iterable[tuple[Tensor, list[DetDataSample]]], mirrored: bool = False
) -> list[Detections]:
    """:func:`detect` for images (B, 3, H, W) that are normalised and padded, with their data samples."""
    found = []
    with evaluating(model):
        for inputs, samples in batches:
            if mirrored:
                inputs = mirror_images(inputs, [sample.img_shape for sample in samples])
            for sample in model(inputs, samples, mode='predict'):
                detections = as_detections(sample)
                found.append(detections.mirror(sample.ori_shape[1]) if mirrored else detections)
    if not found:
        raise ComparisonError('there was no image to compare detections on')
    return found


def mirror_images(images: Tensor, shapes: Iterable[tuple[int, ...]]) -> Tensor:
    """Returns images (B, C, H, W) with left and right exchanged; the padding beyond (h, w) of ``shapes`` stays."""
    mirrored = images.clone()
    for image, before, (height, width) in zip(mirrored, images, (shape[:2] for shape in shapes), strict=True):
        image[:, :height, :width] = before[:, :height, :width].flip(-1)
    return mirrored


def as_detections(sample: DetDataSample) -> Detections:
    """Returns the detections of a predicted sample, with masks if it has them; raises as :func:`detect`."""
    instances = sample.get('pred_instances')
    if instances is None:
        raise ComparisonError('the model predicts no pred_instances: there are no detections to compare')
    scores = instances.scores.double().cpu().numpy()
    if 'masks' in instances:
        regions = instances.masks
        # slab_det.deploy(masks='rle') returns encoded masks.
        if not isinstance(regions, list):
            regions = encode_mask_results(np.asarray(torch.as_tensor(regions).cpu()))
        # One by one: coco_mask.area takes at most 255 masks.
        has_area = np.array([coco_mask.area(mask) > 0 for mask in regions], bool)
    else:
        corners = instances.bboxes.double().cpu().numpy()
        regions = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1)
        has_area = (regions[:, 2:] > 0).all(1)
    # A region without area overlaps with nothing. The comparison also drops NaN scores.
    valid = np.flatnonzero(has_area & (scores > 0))
    order = valid[np.argsort(-scores[valid], kind='stable')]
    return Detections(scores, instances.labels.cpu().numpy(), regions).select(order)
