"""Reads a COCO file once, and finds what mmdet and pycocotools would drop, mix up or fail on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mmengine.logging import MMLogger

from slab_det.common.errors import DataError, name_some

# Why an annotation is no object to learn or to find: the key that says so, and the words for it.
REASONS = {
    'image': ('image_id', 'name no image of "images"'),
    'ignore': ('ignore', 'are marked "ignore"'),
    'outside': ('bbox', 'do not overlap their image'),
    'area': ('area', 'have an area of 0 or less'),
    'small': ('bbox', 'are under one pixel wide or high (COCO boxes are in pixels, not from 0 to 1)'),
    'category': ('category_id', 'name no category of "categories"'),
    'crowd': ('iscrowd', 'are marked "iscrowd", which is for groups of objects'),
}
# People set these on purpose: in CityPersons they are half of the boxes, in CrowdHuman a quarter, in COCO under 2 %.
DELIBERATE = ('ignore', 'crowd')
# Nobody loses so many objects on purpose.
MAX_LOST = 0.25


@dataclass
class CocoFile:
    """A parsed COCO file whose ids are unique, with numbers where numbers belong.

    Attributes:
        where: Split and path, for messages.
        images: The images by id.
        categories: The names of the categories by id, in the order of the file.
        annotations: The annotations of these images.
        strays: The annotations whose image_id is not among ``images``.
    """

    where: str
    images: dict
    categories: dict
    annotations: list[dict]
    strays: list[dict]

    def wanted(self, classes: Sequence[str]) -> set:
        """The ids of the categories that are named in ``classes``."""
        return {key for key, name in self.categories.items() if name in classes}


def read_coco(path: str, where: str) -> CocoFile:
    """Parses a COCO file.

    Args:
        path: The file.
        where: Split and path, for messages.

    Raises:
        DataError: If it is not COCO JSON, two images, categories or annotations have one id, or an annotation lacks a
            key that mmdet reads.
    """
    with coco_errors(where):
        with open(path) as file:
            content = json.load(file)
        images = _by_id(content['images'], where, 'images')
        categories = {key: one['name'] for key, one in _by_id(content['categories'], where, 'categories').items()}
        # Test sets are published without annotations.
        found: dict[bool, list] = {True: [], False: []}
        for item in content.get('annotations', ()):
            found[item['image_id'] in images].append(item)
        _by_id([item for item in content.get('annotations', ()) if item.get('id') is not None], where, 'annotations')
        for image in images.values():
            if not (image['width'] >= 0 and image['height'] >= 0 and isinstance(image['file_name'], str)):
                raise ValueError(f'image {image["id"]!r} has a negative size, or no text as file_name')
    if not images:
        raise DataError(f'{where} names no image: its "images" is empty')
    coco = CocoFile(where, images, categories, found[True], found[False])
    require_keys(coco, 'id', 'category_id', 'area', 'bbox')
    return coco


def require_keys(coco: CocoFile, *keys: str) -> None:
    """Raises DataError if an annotation lacks one of ``keys``, or has null there."""
    for item in coco.annotations:
        if absent := [key for key in keys if item.get(key) is None]:
            raise DataError(
                f'{coco.where}: an annotation of image {item["image_id"]} has no {" and no ".join(absent)}; COCO has '
                'them in each (area = width * height, iscrowd = 0)'
            )


def check_annotation_ids(coco: CocoFile) -> None:
    """Raises DataError if pycocotools would misread ids of annotations: it takes an object with the id 0 for unmatched.

    It also needs ids that are numbers.
    """
    remedy = "number them from 1: for number, item in enumerate(content['annotations'], 1): item['id'] = number"
    for item in coco.annotations:
        try:
            fault = 'which pycocotools takes for no object: it would count as missed' if float(item['id']) == 0 else ''
        except (TypeError, ValueError):
            fault = 'and pycocotools reads numbers alone'
        if fault:
            raise DataError(f'{coco.where}: an annotation has the id {item["id"]!r}, {fault}; {remedy}')


def check_categories(coco: CocoFile, classes: Sequence[str], split: str) -> None:
    """Raises DataError unless all ``classes`` are categories of the file, in the order of the file.

    mmdet numbers the classes in the order of the file, whatever ``classes`` says.
    """
    names = [*coco.categories.values()]
    if numbers := [name for name in (*names, *classes) if not isinstance(name, str)]:
        raise DataError(
            f'{coco.where}: names of categories are text, and {name_some(map(repr, numbers))} is none: write '
            f'"{numbers[0]}" in quotes, in the file and in metainfo=dict(classes=…)'
        )
    found = [name for name in names if name in classes]
    if found == [*classes]:
        return
    if len(set(found)) < len(found) and len(set(classes)) == len(classes):
        doubles = [f'{name} (id {key!r})' for key, name in coco.categories.items() if found.count(name) > 1]
        raise DataError(
            f'{coco.where}: its categories {name_some(doubles)} share a name, and mmdet would give each a label of its '
            'own: rename them, make them one, or take out the one without objects, with which exports of Roboflow begin'
        )
    what = f"{coco.where}: the config's {len(classes)} classes ({name_some(classes)}) are "
    if sorted(found) == sorted(classes):
        remedy = f'put its "categories" in the order ({name_some(classes)}), as mmdet numbers classes by that order'
        if split == 'train':
            remedy += f', or set metainfo=dict(classes={(*found,)}) in the datasets of all splits'
        raise DataError(f'{what}not in the same order as its categories ({name_some(names)}): {remedy}')
    what += f'not among its {len(names)} categories ({name_some(names)}), or not in the same order: '
    if split == 'train':
        raise DataError(
            f'{what}set metainfo=dict(classes={(*names,)}) in the dataset and num_classes={len(names)} in the heads, '
            'or give a file that is one of several a category for each class, in the same order'
        )
    raise DataError(
        f'{what}set metainfo=dict(classes=…) to the classes that the detector is trained with, and give the file a '
        'category for each of them, in that order; a category may have no object'
    )


def check_corners(coco: CocoFile) -> None:
    """Raises DataError if more than a quarter of the boxes end outside of their image, as corners do."""
    outside = []
    with coco_errors(coco.where):
        for item in coco.annotations:
            (x, y, width, height), image = item['bbox'], coco.images[item['image_id']]
            # Boxes of real data leave their image by a few pixels.
            if x + width > 1.05 * image['width'] or y + height > 1.05 * image['height']:
                outside.append(item['bbox'])
    # If the boxes are corners, half of them or more end outside.
    if len(outside) > len(coco.annotations) / 4:
        raise DataError(
            f'{coco.where}: {len(outside)} of its {len(coco.annotations)} boxes end outside of their image, such as '
            f'{outside[0]}: COCO boxes are [x, y, width, height], not corners'
        )


def count_objects(coco: CocoFile, classes: Sequence[str]) -> int:
    """Counts the objects of ``classes`` that mmdet takes from the file, and logs a line about those that it drops.

    The line is a warning if more than a quarter is marked "iscrowd" or "ignore".

    Raises:
        DataError: If it drops all of them, or more than a quarter without such a mark, with count and reason, or if the
            ids of images or categories are off by one.
    """
    lost, total = _find_losses(coco, classes)
    num_lost = sum(map(len, lost.values()))
    if not num_lost:
        return total
    told = '; '.join(
        f'{len(items)} {words} (annotation {items[0].get("id")!r} has {key} = {items[0][key]!r})'
        for name, (key, words) in REASONS.items()
        if (items := lost[name])
    )
    message = f'{coco.where}: {num_lost} of its {total} annotations are no objects to learn or to find: {told}'
    # A list of images that was cut short leaves annotations behind, which are no fault unless other images lack theirs.
    idle = len(coco.images.keys() - {item['image_id'] for item in coco.annotations})
    behind = len(lost['image']) if idle <= len(coco.images) * MAX_LOST else 0
    marked, most = sum(len(lost[name]) for name in DELIBERATE), (total - behind) * MAX_LOST
    if num_lost == total or num_lost - behind - marked > most:
        raise DataError(f'{message}. Correct them, or take them out of the file')
    logger = MMLogger.get_current_instance()
    (logger.warning if marked > most else logger.info)(message)
    return total - num_lost


def _find_losses(coco: CocoFile, classes: Sequence[str]) -> tuple[dict[str, list[dict]], int]:
    """The annotations that mmdet drops, by reason, and the number of all that are of ``classes`` or of no category."""
    wanted = coco.wanted(classes)
    # Categories that classes does not name are left out on purpose.
    others = coco.categories.keys() - wanted
    lost: dict[str, list[dict]] = {name: [] for name in REASONS}
    with coco_errors(coco.where):
        _check_shift(coco, 'image_id', coco.images, [*coco.annotations, *coco.strays])
        _check_shift(coco, 'category_id', coco.categories, coco.annotations)
        items = [item for item in (*coco.annotations, *coco.strays) if item.get('category_id') not in others]
        for item in items:
            if reason := find_loss(item, coco.images.get(item['image_id']), wanted):
                lost[reason].append(item)
    return lost, len(items)


def find_loss(item: dict, image: dict | None, wanted: set) -> str | None:
    """Why mmdet takes no object from an annotation, a key of REASONS; None if it takes one.

    The conditions are those of CocoDataset.parse_data_info, in its order; NaN compares as there.
    """
    if image is None:
        return 'image'
    if item.get('ignore'):
        return 'ignore'
    x, y, width, height = item['bbox']
    inside_width = max(0, min(x + width, image['width']) - max(x, 0))
    inside_height = max(0, min(y + height, image['height']) - max(y, 0))
    if inside_width * inside_height == 0:
        return 'outside'
    if item['area'] <= 0:
        return 'area'
    if width < 1 or height < 1:
        return 'small'
    if item['category_id'] not in wanted:
        return 'category'
    # mmdet keeps it, but no detector learns from it and no evaluation asks for it.
    return 'crowd' if item.get('iscrowd') else None


def check_filter(coco: CocoFile, classes: Sequence[str], filter_cfg: dict) -> None:
    """Raises DataError if the ``filter_cfg`` of a training dataset leaves no image."""
    wanted, min_size = coco.wanted(classes), filter_cfg.get('min_size', 0)
    labelled = {item['image_id'] for item in coco.annotations if item['category_id'] in wanted}
    empty = [key for key in coco.images if key not in labelled] if filter_cfg.get('filter_empty_gt') else []
    small = [key for key, image in coco.images.items() if min(image['width'], image['height']) < min_size]
    if len({*empty, *small}) == len(coco.images):
        raise DataError(
            f'{coco.where}: filter_cfg leaves none of its {len(coco.images)} images: {len(empty)} have no annotation '
            f'of the classes ({name_some(classes)}), and {len(small)} are smaller than min_size={min_size}; correct '
            'the annotations or filter_cfg'
        )


def _by_id(entries: list[dict], where: str, what: str) -> dict:
    counts = Counter(entry['id'] for entry in entries)
    if double := [key for key, count in counts.items() if count > 1]:
        raise DataError(
            f'{where}: {len(double)} ids are shared by two or more of its {what} ({name_some(map(repr, double))}), '
            f'which mmdet and pycocotools would take for one: give each of its {what} an id of its own'
        )
    return {entry['id']: entry for entry in entries}


def _check_shift(coco: CocoFile, key: str, ids: dict, items: list[dict]) -> None:
    """Raises DataError if all values of ``key`` are one below or one above the ids, and not all are ids.

    Most of them would be ids of another image or category.
    """
    used = {item[key] for item in items}
    if used <= ids.keys() or not all(isinstance(value, int) for value in used):
        return
    for step, words in ((1, 'below'), (-1, 'above')):
        if {value + step for value in used} <= ids.keys():
            raise DataError(
                f'{coco.where}: every {key} of its annotations is one {words} an id, and {min(used - ids.keys())} is '
                f'none (the ids are {name_some(map(repr, ids))}): count from the same number in both'
            )


@contextmanager
def coco_errors(where: str) -> Iterator[None]:
    """Turns errors of values that are not as COCO has them into a DataError that names the file ``where``."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f'{where} is not COCO JSON: {error!r}') from error
