"""Looks for a config's annotation files and image folders, and at the classes, before anything slow happens."""

import json
import os
import os.path as osp
import re
from collections.abc import Iterator, Sequence
from copy import deepcopy

from mmdet.datasets import BaseDetDataset, CocoDataset
from mmdet.registry import DATASETS
from mmengine.config import Config, ConfigDict
from torch import nn
from torch.utils.data import Dataset

from slab_det.data.synthetic import SyntheticShapes
from slab_det.runtime.config import type_name
from slab_det.runtime.distributed import unwrap
from slab_det.runtime.errors import DataError, name_some
from slab_det.runtime.scope import enter_scope

SPLITS = ('train', 'val', 'test')
# Larger annotation files would be parsed twice for seconds; mmdet reads them anyway a moment later.
MAX_PARSED_BYTES = 50 * 2**20


def check_data(cfg: Config, splits: Sequence[str] = SPLITS) -> None:
    """Raises where the data of a config is not there, does not fit it, or is empty.

    Datasets are found through every wrapper. Remote paths (``s3://…``) and generated images are left alone.

    Args:
        cfg: A config with ``<split>_dataloader`` entries; absent ones are skipped.
        splits: Which of 'train', 'val' and 'test' will be used.

    Raises:
        DataError: Naming the split, the missing path, and what to do about it.
    """
    enter_scope(cfg)
    for split in splits:
        datasets = [*_datasets(cfg, split)]
        for dataset in datasets:
            _check_dataset(dataset, split)
        for evaluator in _evaluators(cfg, split):
            ann_file = evaluator.get('ann_file') or ''
            # The file for several datasets holds the images of several folders.
            if ann_file and '://' not in ann_file and len(datasets) == 1:
                (dataset,) = datasets
                read = osp.join(dataset.get('data_root') or '', dataset.get('ann_file') or '')
                # An absolute name is not joined to data_root.
                ann_file = osp.abspath(ann_file)
                if ann_file != osp.abspath(read):
                    _check_dataset(ConfigDict(dataset, ann_file=ann_file), f'{split}_evaluator')


def check_num_classes(model: nn.Module, dataset: Dataset, split: str) -> None:
    """Raises where a head of ``model`` has another number of classes than a dataset.

    mmdet would index classes that are not there, or take the surplus class of the data for background.

    Args:
        model: A detector, whose box, mask and panoptic heads are looked at, also those of a cascade, or a classifier.
        dataset: With ``metainfo``, where classes are named; others are left alone.
        split: What the message calls the dataset.

    Raises:
        DataError: Naming the head and both numbers.
    """
    model = unwrap(model)
    if hasattr(model, 'language_model'):
        # Grounding DINO's number is the length of its text.
        return
    metainfo = getattr(dataset, 'metainfo', {})
    classes = metainfo.get('classes')
    # Two-stage panoptic detectors have boxes of things alone.
    numbers = {len(metainfo[key]) for key in ('classes', 'thing_classes') if metainfo.get(key)}
    for name, module in model.named_modules():
        num_classes = getattr(module, 'num_classes', None)
        is_head = re.search(r'^head$|(^|\.)(bbox|mask|panoptic)_head(\.\d+)?$', name)
        if classes and is_head and num_classes is not None and num_classes not in numbers:
            raise DataError(
                f'{name} has num_classes={num_classes}, but the {split} dataset has {len(classes)} classes '
                f'({name_some(classes)}). Set num_classes={len(classes)} in every head, or metainfo=dict(classes=…) in '
                'the datasets.'
            )


def set_data_root(cfg: Config, root: str) -> None:
    """Makes every dataset and evaluator of a config read below another folder, in place.

    ``--cfg-options data_root=…`` does not do that: configs copy the variable when they are parsed. Image
    folders may lie directly in the root, as in COCO's archives, or in its ``images`` folder.

    Args:
        cfg: A config whose datasets have a ``data_root``.
        root: The new folder.

    Raises:
        DataError: If ``root`` is not a folder.
    """
    if not osp.isdir(root):
        raise DataError(f'--data-root {root} is not a folder')
    for split in SPLITS:
        # A folder of pictures has no layout below a root.
        datasets = [dataset for dataset in _datasets(cfg, split) if type_name(dataset.type) != 'ImageFolder']
        old_roots = {osp.normpath(dataset.data_root) for dataset in datasets if dataset.get('data_root')}
        for evaluator in _evaluators(cfg, split):
            ann_file = osp.normpath(evaluator.get('ann_file') or '')
            for old_root in old_roots:
                if ann_file.startswith(osp.join(old_root, '')):
                    evaluator.ann_file = osp.join(root, osp.relpath(ann_file, old_root))
        for dataset in datasets:
            dataset.data_root = root
            prefixes = dataset.get('data_prefix')
            # Datasets of classes may name one folder.
            for name, prefix in prefixes.items() if isinstance(prefixes, dict) else ():
                if not osp.exists(osp.join(root, prefix)) and osp.exists(osp.join(root, 'images', prefix)):
                    dataset.data_prefix[name] = osp.join('images', prefix)
    if 'data_root' in cfg:
        cfg.data_root = root


def _datasets(cfg: Config, split: str) -> Iterator[ConfigDict]:
    """The datasets that read files, through RepeatDataset, ConcatDataset and every other wrapper."""
    dataloader = cfg.get(f'{split}_dataloader')
    pending = [] if dataloader is None else [dataloader.dataset]
    while pending:
        dataset = pending.pop(0)
        # Wrappers hold `dataset` or `datasets`, and no wrapper of mmengine or mmdet reads files itself.
        inner = dataset.get('datasets') or ([dataset.dataset] if 'dataset' in dataset else [])
        pending += inner
        if not inner:
            yield dataset


def _evaluators(cfg: Config, split: str) -> list[ConfigDict]:
    evaluators = cfg.get(f'{split}_evaluator') or []
    return evaluators if isinstance(evaluators, list) else [evaluators]


def _check_dataset(dataset: ConfigDict, split: str) -> None:
    # Where the runner looks.
    with DATASETS.switch_scope_and_registry(dataset.get('_scope_')) as registry:
        dataset_class = registry.get(dataset.type) if isinstance(dataset.type, str) else dataset.type
    if dataset_class is None:
        raise DataError(f'{split}_dataloader: no dataset is called {dataset.type!r}')
    # Datasets of classifiers say themselves what they lack.
    if issubclass(dataset_class, SyntheticShapes) or not issubclass(dataset_class, BaseDetDataset):
        return
    root, ann_file, prefixes = dataset.get('data_root') or '', dataset.get('ann_file'), dataset.get('data_prefix', {})
    classes = tuple(dataset_class._load_metainfo(deepcopy(dataset.get('metainfo'))).get('classes') or ())
    paths = [('image folder', 'data_prefix=dict(img=…)', osp.join(root, prefix)) for prefix in prefixes.values()]
    if ann_file:
        ann_file = osp.join(root, ann_file)
        paths.insert(0, ('annotation file', 'ann_file=…', ann_file))
    for what, argument, path in paths:
        # mmengine's file backends read remote paths; only they know what is there.
        if not osp.exists(path) and '://' not in path:
            start = '' if osp.isabs(path) else f' from {os.getcwd()}'
            raise DataError(
                f'{split} {what} {path} not found{start}: correct {argument} of the dataset, or add --data-root DIR; '
                'docs/reproduce-coco.md downloads COCO, and `slab-det quickstart` trains on images that it generates'
            )
    # Classes that read their files otherwise, such as LVIS's and the panoptic ones, are left alone.
    reads_coco = all(
        getattr(dataset_class, name, None) is getattr(CocoDataset, name)
        for name in ('load_data_list', 'parse_data_info')
    )
    if ann_file and classes and reads_coco and osp.isfile(ann_file):
        _check_annotations(ann_file, osp.join(root, prefixes.get('img', '')), classes, split)


def _check_annotations(ann_file: str, folder: str, classes: Sequence[str], split: str) -> None:
    if osp.getsize(ann_file) > MAX_PARSED_BYTES:
        return
    named, is_test = f'{split} annotation file {ann_file}', split.startswith('test')
    try:
        with open(ann_file) as file:
            content = json.load(file)
        categories = {category['id']: category['name'] for category in content['categories']}
        images = {image['id']: image for image in content['images']}
        files = [osp.join(folder, image['file_name']) for image in images.values()]
        # Test sets are published without annotations.
        annotations = content.get('annotations', []) if is_test else content['annotations']
        outside = [item for item in annotations if _box_leaves(item, images)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f'{named} is not COCO JSON: {error!r}') from error
    lost = [] if '://' in folder else [file for file in files if not osp.exists(file)]
    if lost:
        raise DataError(
            f'{named} names {len(files)} images, {len(lost)} of which are not there, {lost[0]} for one. Unpack them '
            'there, correct data_prefix=dict(img=…) of the dataset, or take them out of the file.'
        )
    if not images or not (annotations or is_test):
        raise DataError(f'{named} holds {len(images)} images and {len(annotations)} annotations.')
    found = [name for name in categories.values() if name in classes]
    # mmdet numbers them as they come in the file: others would go under wrong names.
    if found != [*classes]:
        raise DataError(
            f'{named}: {len(found)} of its {len(categories)} categories ({name_some(categories.values())}) are among '
            f"the config's {len(classes)} classes ({name_some(classes)}). Classes must be categories of the file, in "
            f'its order: for all, set metainfo=dict(classes={(*categories.values(),)}) in the dataset and '
            f'num_classes={len(categories)} in the heads.'
        )
    # Half of the boxes or more, where corners stand in the place of sizes; few, where images cut boxes off.
    if len(outside) > len(annotations) / 4:
        image = images[outside[0]['image_id']]
        raise DataError(
            f'{named}: {len(outside)} of its {len(annotations)} boxes end outside of their image: '
            f'annotation {outside[0]["id"]}, {outside[0]["bbox"]} in {image["width"]} x {image["height"]} pixels, for '
            'one. COCO has [x, y, width, height]; of corners, [x1, y1, x2, y2], take [x1, y1, x2 - x1, y2 - y1].'
        )


def _box_leaves(annotation: dict, images: dict[int, dict]) -> bool:
    """Whether the box ends outside of its image by more than the few pixels that boxes of real data do."""
    if annotation['image_id'] not in images:
        return False
    image, (x, y, width, height) = images[annotation['image_id']], annotation['bbox']
    return x + width > 1.05 * image['width'] or y + height > 1.05 * image['height']
