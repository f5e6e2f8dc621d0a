"""Finds masks of a COCO file that mmdet or pycocotools would fail on, in the middle of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mmengine.logging import MMLogger
from pycocotools.mask import frPyObjects, toBbox

from slab_det.common.errors import DataError
from slab_det.preflight.annotations import MAX_LOST, CocoFile, coco_errors, find_loss

# Polygons of COCO take about 10 s, and these tell as much.
MAX_COMPARED = 2000
# A box around what is hidden too, as in amodal sets, overlaps by more.
MIN_OVERLAP = 0.5


def check_masks(coco: CocoFile, classes: Sequence[str], evaluated: bool, polygons_only: bool = False) -> None:
    """Checks the segmentation of every object that is trained on or evaluated.

    A training ignores objects whose mask has too few points, or is of a kind that it does not read: a warning says so.

    Args:
        coco: The file.
        classes: The classes; other categories are not read.
        evaluated: Whether pycocotools reads the masks, also those of boxes that mmdet drops.
        polygons_only: Whether ``LoadAnnotations(poly2mask=False)`` reads them, which ignores other masks.

    Raises:
        DataError: Naming the first annotation whose mask cannot be read, and their number; also if a training would
            ignore more than a quarter, or if most masks do not lie in the boxes of their objects.
    """
    wanted, faults, ignored, objects, total = coco.wanted(classes), [], [], [], 0
    for item in coco.annotations:
        image = coco.images[item['image_id']]
        loss = find_loss(item, image, wanted)
        read = item['category_id'] in wanted and (evaluated or loss in (None, 'crowd'))
        # A crowd is ignored anyhow.
        only = polygons_only and not item.get('iscrowd')
        total += read
        if read and (fault := find_fault(item.get('segmentation'), image, evaluated, only)):
            is_ignored = not evaluated and _is_ignored(item.get('segmentation'), only)
            (ignored if is_ignored else faults).append((item, fault))
        elif loss is None:
            objects.append(item)
    _check_extents(coco, objects)
    if not (faults or ignored):
        return
    item, fault = (faults or ignored)[0]
    message = (
        f'{coco.where}: annotation {item["id"]!r} of image {item["image_id"]!r} {fault}; {len(faults or ignored)} of '
        f'its {len(coco.annotations)} annotations have no mask that can be read'
    )
    if faults or len(ignored) > total * MAX_LOST:
        raise DataError(
            f"{message}. Correct or remove them, or take a detector without masks (with_mask=False, metric='bbox')"
        )
    MMLogger.get_current_instance().warning(f'{message}, and are ignored')


def _check_extents(coco: CocoFile, objects: list[dict]) -> None:
    """Warns of masks, of all or of 2,000 that are evenly spaced, whose extent is another box than their object's.

    Raises:
        DataError: If more than half of them do: boxes without their masks were resized, or the reverse.
    """
    objects = objects[:: math.ceil(len(objects) / MAX_COMPARED) or 1]
    with coco_errors(coco.where):
        extents = [mask_extent(item) for item in objects]
    pairs = zip(objects, extents, strict=True)
    others = [(item, extent) for item, extent in pairs if _overlap(extent, item['bbox']) < MIN_OVERLAP]
    if not others:
        return
    item, extent = others[0]
    message = (
        f'{coco.where}: {len(others)} of {len(objects)} masks do not lie in the boxes of their objects: annotation '
        f'{item["id"]!r} has bbox {[round(value, 1) for value in item["bbox"]]}, and its mask is in '
        f'{[round(value, 1) for value in extent]}'
    )
    if len(others) > len(objects) / 2:
        raise DataError(f'{message}. Give "bbox" and "segmentation" in pixels of the same image')
    MMLogger.get_current_instance().warning(message)


def mask_extent(item: dict) -> list[float]:
    """The smallest box, [x, y, width, height], around the mask of an annotation that has no fault."""
    segmentation = item['segmentation']
    if isinstance(segmentation, dict):
        if isinstance(segmentation['counts'], list):
            segmentation = frPyObjects(segmentation, *segmentation['size'])
        return toBbox(segmentation).tolist()
    xs, ys = ([value for part in segmentation if _is_area(part) for value in part[start::2]] for start in (0, 1))
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]


def _overlap(first: Sequence[float], second: Sequence[float]) -> float:
    """The IoU of two boxes, each grown by a pixel on each side: tools count a pixel's border differently."""
    spans, areas = 1.0, [1.0, 1.0]
    for axis in (0, 1):
        ends = [(box[axis] - 1, box[axis] + box[axis + 2] + 1) for box in (first, second)]
        spans *= max(0.0, min(end for _, end in ends) - max(start for start, _ in ends))
        areas = [area * (end - start) for area, (start, end) in zip(areas, ends, strict=True)]
    return spans / (sum(areas) - spans)


def _is_ignored(segmentation: object, polygons_only: bool) -> bool:
    """Whether mmdet's LoadAnnotations leaves out an object whose mask has a fault, and does not fail on it."""
    if isinstance(segmentation, list) and segmentation:
        return all(isinstance(polygon, list) and not _is_area(polygon) for polygon in segmentation)
    if not isinstance(segmentation, dict) or not segmentation:
        return False
    is_rle = isinstance(segmentation.get('counts'), (str, list)) and segmentation.get('size') is not None
    return polygons_only or not is_rle


def find_fault(segmentation: object, image: dict, evaluated: bool, polygons_only: bool) -> str | None:
    """What is wrong with a segmentation; None if nothing is."""
    if not segmentation:
        return 'has no segmentation'
    if isinstance(segmentation, dict):
        return _rle_fault(segmentation, image, polygons_only)
    if not isinstance(segmentation, list) or not all(isinstance(polygon, list) for polygon in segmentation):
        return 'has a segmentation that is not a list of polygons: COCO has [[x1, y1, x2, y2, …], …]'
    if not all(isinstance(value, (int, float)) for polygon in segmentation for value in polygon[:1]):
        return 'has polygons that are not lists of numbers: COCO has [[x1, y1, x2, y2, …], …]'
    valid = [_is_area(polygon) for polygon in segmentation]
    # mmdet leaves out invalid polygons. pycocotools takes the kind of all from the first one.
    if not any(valid) or (evaluated and not valid[0]):
        return f'has a polygon of {len(segmentation[valid.index(False)])} numbers: three points are six'
    return None


def _is_area(polygon: list) -> bool:
    return len(polygon) >= 6 and len(polygon) % 2 == 0


def _rle_fault(rle: dict, image: dict, polygons_only: bool) -> str | None:
    if polygons_only:
        return 'has an RLE mask, which LoadAnnotations(poly2mask=False) ignores: give polygons'
    size, counts = [image['height'], image['width']], rle.get('counts')
    if rle.get('size') != size:
        return f'has an RLE mask of size {rle.get("size")}, and its image has [height, width] = {size}'
    if not isinstance(counts, (str, list)):
        return 'has an RLE mask without "counts"'
    if isinstance(counts, list) and sum(counts) != size[0] * size[1]:
        return f'has an RLE mask of {sum(counts)} pixels, and its image has {size[0] * size[1]}'
    return None
