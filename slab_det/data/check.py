"""Checks that a config's data exists and fits the config, before training or testing starts."""

import json
import os.path as osp
from collections.abc import Iterator, Sequence
from copy import deepcopy

from mmdet.datasets import BaseDetDataset, CocoDataset
from mmdet.registry import DATASETS
from mmengine.config import Config, ConfigDict
from torch import nn
from torch.utils.data import Dataset

from slab_det.data.synthetic import SyntheticShapes
from slab_det.runtime.config import type_name, walk_datasets
from slab_det.runtime.distributed import unwrap
from slab_det.runtime.errors import DataError, name_some
from slab_det.runtime.scope import enter_scope

SPLITS = ('train', 'val', 'test')
HEADS = ('head', 'bbox_head', 'mask_head', 'panoptic_head')
# Larger annotation files are not checked: parsing takes seconds, and mmdet parses them again right after.
MAX_PARSED_BYTES = 50 * 2**20


def check_data(cfg: Config, splits: Sequence[str] = SPLITS) -> None:
    """Raises an error if files of datasets or evaluators are missing, or COCO annotations do not fit the config.

    Remote paths (``s3://…``) and generated images are not checked.

    Args:
        cfg: A config with ``<split>_dataloader`` entries; absent ones are skipped.
        splits: The splits that will be used, of 'train', 'val' and 'test'.

    Raises:
        DataError: Naming the split, the missing path, and what to do about it.
    """
    enter_scope(cfg)
    for split in splits:
        for dataset in _file_datasets(cfg, split):
            _check_dataset(dataset, split)
        for evaluator in _evaluators(cfg, split):
            if evaluator.get('ann_file'):
                _check_path(evaluator['ann_file'], f'{split} evaluator: annotation file', 'ann_file=…')


def check_num_classes(model: nn.Module, dataset: Dataset, split: str) -> None:
    """Raises DataError if a head of ``model`` and the dataset of a split differ in the number of classes.

    mmdet would predict classes that do not exist, or train objects of surplus classes as background.
    """
    model = unwrap(model)
    metainfo = getattr(dataset, 'metainfo', {})
    classes = metainfo.get('classes')
    # In Grounding DINO num_classes is the length of the text.
    if not classes or hasattr(model, 'language_model'):
        return
    # The box heads of panoptic detectors predict thing classes only.
    numbers = (len(classes), len(metainfo.get('thing_classes', classes)))
    for name, module in model.named_modules():
        num_classes = getattr(module, 'num_classes', None)
        # The heads of a cascade are numbered.
        is_head = name.rstrip('.0123456789').rpartition('.')[2] in HEADS
        if is_head and num_classes is not None and num_classes not in numbers:
            raise DataError(
                f'{name} has num_classes={num_classes}, but the {split} dataset has {len(classes)} classes '
                f'({name_some(classes)}). Set num_classes={len(classes)} in every head, or metainfo=dict(classes=…) in '
                'the datasets.'
            )


def set_data_root(cfg: Config, root: str) -> None:
    """Changes the data root of every dataset and evaluator of a config, in place.

    ``--cfg-options data_root=…`` comes too late: a parsed config holds copies of the variable. Image folders may lie
    directly in the root, as in COCO's archives, or in its ``images`` folder.

    Args:
        cfg: A config whose datasets have a ``data_root``.
        root: The new folder.

    Raises:
        DataError: If ``root`` is not a folder.
    """
    if not osp.isdir(root):
        raise DataError(f'--data-root {root} is not a folder')
    for split in SPLITS:
        # ImageFolder has no data_root.
        datasets = [part for part in _file_datasets(cfg, split) if type_name(part.type) != 'ImageFolder']
        old_roots = {osp.normpath(dataset.data_root) for dataset in datasets if dataset.get('data_root')}
        for evaluator in _evaluators(cfg, split):
            ann_file = osp.normpath(evaluator.get('ann_file') or '')
            for old_root in old_roots:
                if ann_file.startswith(osp.join(old_root, '')):
                    evaluator.ann_file = osp.join(root, osp.relpath(ann_file, old_root))
        for dataset in datasets:
            dataset.data_root = root
            prefixes = dataset.get('data_prefix')
            # A classification dataset may name one folder, as a string.
            for name, prefix in prefixes.items() if isinstance(prefixes, dict) else ():
                if not osp.exists(osp.join(root, prefix)) and osp.exists(osp.join(root, 'images', prefix)):
                    dataset.data_prefix[name] = osp.join('images', prefix)
    if 'data_root' in cfg:
        cfg.data_root = root


def _file_datasets(cfg: Config, split: str) -> Iterator[ConfigDict]:
    """Yields the datasets of a split that read files, without wrappers such as RepeatDataset."""
    dataloader = cfg.get(f'{split}_dataloader')
    for dataset in walk_datasets(dataloader.dataset) if dataloader else ():
        if 'dataset' not in dataset and not dataset.get('datasets'):
            yield dataset


def _evaluators(cfg: Config, split: str) -> list[ConfigDict]:
    evaluators = cfg.get(f'{split}_evaluator') or []
    return evaluators if isinstance(evaluators, list) else [evaluators]


def _check_path(path: str, what: str, argument: str) -> None:
    # Remote paths are not checked: only mmengine's file backends can read them.
    if not osp.exists(path) and '://' not in path:
        raise DataError(
            f'{what} {osp.abspath(path)} not found: correct {argument}, or add --data-root DIR; docs/models.md '
            'shows how to download COCO; `slab-det quickstart` trains on generated images'
        )


def _check_dataset(dataset: ConfigDict, split: str) -> None:
    # The runner finds the class in the same way.
    with DATASETS.switch_scope_and_registry(dataset.get('_scope_')) as registry:
        kind = registry.get(dataset.type) if isinstance(dataset.type, str) else dataset.type
    if kind is None:
        raise DataError(f'{split}_dataloader: no dataset is called {dataset.type!r}')
    # Classification datasets report missing files themselves.
    if issubclass(kind, SyntheticShapes) or not issubclass(kind, BaseDetDataset):
        return
    root, prefixes = dataset.get('data_root') or '', dataset.get('data_prefix', {})
    ann_file = osp.join(root, dataset.get('ann_file') or '')
    if dataset.get('ann_file'):
        _check_path(ann_file, f'{split} annotation file', 'ann_file=…')
    for prefix in prefixes.values():
        _check_path(osp.join(root, prefix), f'{split} image folder', 'data_prefix=dict(img=…)')
    classes = tuple(kind._load_metainfo(deepcopy(dataset.get('metainfo'))).get('classes') or ())
    # LVIS and the panoptic datasets have other annotation formats.
    methods = ('load_data_list', 'parse_data_info')
    reads_coco = all(getattr(kind, name, None) is getattr(CocoDataset, name) for name in methods)
    if reads_coco and classes and osp.isfile(ann_file) and osp.getsize(ann_file) <= MAX_PARSED_BYTES:
        _check_annotations(ann_file, osp.join(root, prefixes.get('img', '')), classes, split)


def _check_annotations(ann_file: str, folder: str, classes: Sequence[str], split: str) -> None:
    """Checks image files, annotation keys, boxes and class names of a COCO file."""
    where, outside = f'{split} annotation file {ann_file}', []
    try:
        with open(ann_file) as file:
            content = json.load(file)
        names = [category['name'] for category in content['categories']]
        images = {image['id']: image for image in content['images']}
        files = [osp.join(folder, image['file_name']) for image in images.values()]
        # Test sets are published without annotations.
        annotations = [item for item in content.get('annotations', ()) if item['image_id'] in images]
        for item in annotations:
            (x, y, width, height), image = item['bbox'], images[item['image_id']]
            # Boxes of real data leave their image by a few pixels.
            if x + width > 1.05 * image['width'] or y + height > 1.05 * image['height']:
                outside.append(item['bbox'])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f'{where} is not COCO JSON: {error!r}') from error
    for item in annotations:
        # pycocotools fails on a missing key only after the first epoch, and does not name the file.
        if absent := [key for key in ('id', 'category_id', 'area', 'iscrowd') if key not in item]:
            raise DataError(
                f'{where}: an annotation of image {item["image_id"]} has no {" and no ".join(absent)}; COCO has them '
                'in each (area = width * height, iscrowd = 0)'
            )
    for path in files:
        _check_path(path, f'{split} image', 'data_prefix=dict(img=…)')
    # mmdet numbers the classes in the order of the file.
    if [name for name in names if name in classes] != [*classes]:
        raise DataError(
            f"{where}: the config's {len(classes)} classes ({name_some(classes)}) are not among its {len(names)} "
            f'categories ({name_some(names)}), or not in the same order: set metainfo=dict(classes={(*names,)}) in the '
            f'dataset and num_classes={len(names)} in the heads'
        )
    # If the boxes are corners, half of them or more end outside.
    if len(outside) > len(annotations) / 4:
        raise DataError(
            f'{where}: {len(outside)} of its {len(annotations)} boxes end outside of their image, such as '
            f'{outside[0]}: COCO boxes are [x, y, width, height], not corners'
        )
