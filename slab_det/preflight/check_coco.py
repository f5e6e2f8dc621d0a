"""Checks COCO datasets and their evaluators: that files, images, classes, objects and masks fit each other."""

from __future__ import annotations

import os
import os.path as osp
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mmdet.evaluation import CocoMetric
from mmdet.registry import METRICS
from mmengine.config import ConfigDict
from mmengine.logging import MMLogger

from slab_det.common.config import type_name
from slab_det.common.errors import DataError, name_some
from slab_det.preflight.annotations import (
    CocoFile,
    check_annotation_ids,
    check_categories,
    check_corners,
    check_filter,
    count_objects,
    read_coco,
    require_keys,
)
from slab_det.preflight.image_sizes import check_image_sizes
from slab_det.preflight.masks import check_masks

# COCO's training file (448 MiB) takes about 25 s, two thirds of the time of mmdet's own reading right after;
# Objects365's (5 GB) would take minutes.
MAX_PARSED_BYTES = 512 * 2**20


@dataclass
class CheckedDataset:
    """A COCO dataset without faults.

    Attributes:
        coco: Its file.
        path: The path of the file.
        classes: Its class names.
        image_ids: The ids of the images that it takes, before ``filter_cfg``.
        num_objects: Objects of the classes in the file.
    """

    coco: CocoFile
    path: str
    classes: Sequence[str]
    image_ids: list
    num_objects: int


def is_readable(path: str) -> bool:
    """Whether an annotation file is local, and small enough to be parsed before a run."""
    if osp.isfile(path) and osp.getsize(path) > MAX_PARSED_BYTES:
        MMLogger.get_current_instance().warning(f'{path} is larger than {MAX_PARSED_BYTES >> 20} MiB and not checked')
        return False
    return osp.isfile(path)


def is_remote(part: dict) -> bool:
    """Whether a dataset, a step of a pipeline or a metric reads its files from a store, such as LMDB or HTTP."""
    return (part.get('backend_args') or {}).get('backend', 'local') != 'local'


def check_path(path: str, what: str, argument: str) -> None:
    """Raises DataError if a local path does not exist."""
    # Remote paths are not checked: only mmengine's file backends can read them.
    if not osp.exists(path) and '://' not in path:
        raise DataError(
            f'{what} {osp.abspath(path)} not found: correct {argument}, or add --data-root DIR; docs/models.md '
            'shows how to download COCO; `slab-det quickstart` trains on generated images'
        )


def check_coco_dataset(
    coco: CocoFile, path: str, dataset: ConfigDict, folder: str, classes: Sequence[str], split: str, segm: bool
) -> CheckedDataset:
    """Checks everything about a dataset that its config and its file tell.

    Args:
        coco: The annotations.
        path: The file that they were read from.
        dataset: The config of the dataset.
        folder: The folder of its images.
        classes: Its class names.
        split: 'train', 'val' or 'test'.
        segm: Whether an evaluator reads the masks.
    """
    steps = {type_name(step['type']): step for step in dataset.get('pipeline') or () if isinstance(step, dict)}
    loader = steps.get('LoadAnnotations', {})
    with_masks = segm or loader.get('with_mask', False)
    is_local = not is_remote(steps.get('LoadImageFromFile', {}))
    if is_local:
        _check_images_exist(coco, folder, split)
    check_categories(coco, classes, split)
    # Other loaders may turn images by rules of their own.
    if 'LoadImageFromFile' in steps and is_local:
        check_image_sizes(coco, folder, steps['LoadImageFromFile'], with_masks)
    check_corners(coco)
    num_objects = count_objects(coco, classes)
    if not dataset.get('test_mode'):
        check_filter(coco, classes, dataset.get('filter_cfg') or {})
    if with_masks:
        check_masks(coco, classes, segm, not loader.get('poly2mask', True))
    ids, indices = [*coco.images], dataset.get('indices')
    if isinstance(indices, int):
        ids = ids[:indices] if indices >= 0 else ids[indices:]
    elif indices is not None:
        ids = [ids[index] for index in indices]
    return CheckedDataset(coco, path, classes, ids, num_objects)


def is_coco_metric(evaluator: ConfigDict) -> bool:
    """Whether the config of a metric is one of mmdet's CocoMetric or of a class that derives from it."""
    with METRICS.switch_scope_and_registry(evaluator.get('_scope_')) as registry:
        kind = registry.get(evaluator['type']) if isinstance(evaluator['type'], str) else evaluator['type']
    return isinstance(kind, type) and issubclass(kind, CocoMetric)


def check_evaluator(evaluator: ConfigDict, datasets: Sequence[CheckedDataset], split: str) -> None:
    """Raises DataError if a CocoMetric would compare with other images or classes than its datasets have.

    Args:
        evaluator: The config of the metric.
        datasets: All datasets of the split.
        split: 'val' or 'test'.
    """
    path = evaluator.get('ann_file')
    if not path or not is_readable(path) or not is_coco_metric(evaluator):
        return
    is_same = [osp.realpath(path)] == [osp.realpath(dataset.path) for dataset in datasets]
    coco = datasets[0].coco if is_same else read_coco(path, f'{split} evaluator: annotation file {path}')
    # mmdet's datasets do without iscrowd, and pycocotools does not.
    require_keys(coco, 'iscrowd')
    check_annotation_ids(coco)
    _check_same_images(coco, datasets, split)
    if not is_same:
        check_categories(coco, datasets[0].classes, split)
        if 'segm' in evaluator.get('metric', ()):
            check_masks(coco, datasets[0].classes, evaluated=True)
    num_objects = datasets[0].num_objects if is_same else count_objects(coco, datasets[0].classes)
    if not evaluator.get('format_only'):
        _warn_of_objects(coco, datasets[0].classes, num_objects)


def _warn_of_objects(coco: CocoFile, classes: Sequence[str], num_objects: int) -> None:
    """Warns of objects that pycocotools counts and mmdet does not, and of an evaluation without objects."""
    logger = MMLogger.get_current_instance()
    wanted = coco.wanted(classes)
    ignored = [item for item in coco.annotations if item.get('ignore') and item['category_id'] in wanted]
    if counted := sum(not item['iscrowd'] for item in ignored):
        logger.warning(
            f'{coco.where}: {counted} objects are marked "ignore", which pycocotools does not know: it counts them as '
            'objects to find; set iscrowd = 1 too'
        )
    if not num_objects:
        logger.warning(f'{coco.where}: it has no object of the classes ({name_some(classes)}), so AP will be -1')


def _check_same_images(coco: CocoFile, datasets: Sequence[CheckedDataset], split: str) -> None:
    """Raises DataError unless the datasets have the images of the evaluator's file, each of them once."""
    ids = Counter(key for dataset in datasets for key in dataset.image_ids)
    # Different splits often have the same ids. Folders may be written in one file and stand in the config for another.
    names = {key: osp.basename(data.coco.images[key]['file_name']) for data in datasets for key in data.image_ids}
    missed = [key for key, image in coco.images.items() if names.get(key) != osp.basename(image['file_name'])]
    unknown = [key for key in names if key not in coco.images]
    double = [key for key, count in ids.items() if count > 1]
    if not (missed or unknown or double):
        return
    raise DataError(
        f'{coco.where}: {len(missed)} of its {len(coco.images)} images are not in the {split} dataset, which has '
        f'{len(names)} ({", ".join(dataset.path for dataset in datasets)}): all their objects would count as missed; '
        f'{len(unknown)} images of the dataset are not in the file, and {len(double)} ids occur twice. Set ann_file of '
        f'{split}_evaluator to the file of the dataset, and no indices in the dataset'
    )


def _check_images_exist(coco: CocoFile, folder: str, split: str) -> None:
    if '://' in folder:
        return
    listed: dict[str, set] = {}
    for image in coco.images.values():
        path = osp.join(folder, image['file_name'])
        parent, name = osp.split(path)
        if parent not in listed:
            # One listing is faster than a question for each file, above all over a network. Links may be broken.
            entries = os.scandir(parent) if osp.isdir(parent) else ()
            listed[parent] = {entry.name for entry in entries if not entry.is_symlink()}
        if name not in listed[parent]:
            check_path(path, f'{split} image', 'data_prefix=dict(img=…)')
