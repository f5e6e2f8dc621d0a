"""Looks for a config's annotation files and image folders before anything slow happens."""

import json
import os.path as osp
from collections.abc import Iterator, Sequence
from copy import deepcopy

from mmdet.datasets import CocoDataset
from mmdet.registry import DATASETS
from mmengine.config import Config, ConfigDict

from slab_det.data.synthetic import SyntheticShapes
from slab_det.runtime.errors import DataError

SPLITS = ('train', 'val', 'test')
# Larger annotation files would be parsed twice for seconds; mmdet reads them anyway a moment later.
MAX_PARSED_BYTES = 50 * 2**20
# So many images of a dataset, evenly spread, are looked for. All would take minutes on a network disk.
MAX_IMAGES = 200

_COCO_DOWNLOAD = """\
Download COCO 2017 (19 GB) once:
  mkdir -p {root} && cd {root}
  for f in zips/train2017.zip zips/val2017.zip annotations/annotations_trainval2017.zip; do
    curl -LO http://images.cocodataset.org/$f && unzip -q ${{f##*/}} && rm ${{f##*/}}
  done"""
_OTHER_ROOT = 'It lies elsewhere? Add --data-root DIR (tools/train.py, tools/test.py).'
_QUICK_START = 'No data at hand? `make quickstart` trains on images that it generates.'


def check_data(cfg: Config, splits: Sequence[str] = SPLITS) -> None:
    """Raises where the data of a config is not there, does not fit it, or is empty.

    Datasets are found through every wrapper. Remote paths (``s3://…``) and generated images are left alone.

    Args:
        cfg: A config with ``<split>_dataloader`` entries; absent ones are skipped.
        splits: Which of 'train', 'val' and 'test' will be used.

    Raises:
        DataError: Naming the split, the missing path, and what to do about it.
    """
    for split in splits:
        for dataset in _datasets(cfg, split):
            _check_dataset(dataset, split)


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
        old_roots = []
        for dataset in _datasets(cfg, split):
            if isinstance(dataset.get('data_root'), str):
                old_roots.append(dataset.data_root)
            dataset.data_root = root
            for name, prefix in dataset.get('data_prefix', {}).items():
                if not osp.exists(osp.join(root, prefix)) and osp.exists(osp.join(root, 'images', prefix)):
                    dataset.data_prefix[name] = osp.join('images', prefix)
        for evaluator in _evaluators(cfg, split):
            ann_file = evaluator.get('ann_file')
            for old_root in old_roots:
                if isinstance(ann_file, str) and _is_below(ann_file, old_root):
                    evaluator.ann_file = osp.join(root, osp.relpath(ann_file, old_root))
    if 'data_root' in cfg:
        cfg.data_root = root


def _datasets(cfg: Config, split: str) -> Iterator[ConfigDict]:
    """The datasets that read files, through RepeatDataset, ConcatDataset and every other wrapper."""
    dataloader = cfg.get(f'{split}_dataloader')
    if dataloader is None:
        return
    pending = [dataloader.dataset]
    while pending:
        dataset = pending.pop(0)
        # Wrappers hold `dataset` or `datasets`, and no wrapper of mmengine or mmdet reads files itself.
        inner = dataset.get('datasets') or ([dataset.dataset] if 'dataset' in dataset else [])
        pending += inner
        if not inner:
            yield dataset


def _evaluators(cfg: Config, split: str) -> Sequence[ConfigDict]:
    found = cfg.get(f'{split}_evaluator') or []
    return found if isinstance(found, list | tuple) else [found]


def _is_below(path: str, folder: str) -> bool:
    return osp.normpath(path).startswith(osp.normpath(folder) + osp.sep)


def _check_dataset(dataset: ConfigDict, split: str) -> None:
    dataset_class = DATASETS.get(dataset.type) if isinstance(dataset.type, str) else dataset.type
    if dataset_class is None:
        raise DataError(f'{split}_dataloader: no dataset is called {dataset.type!r}')
    root = dataset.get('data_root') or ''
    if issubclass(dataset_class, SyntheticShapes):
        return
    classes = dataset_class._load_metainfo(deepcopy(dataset.get('metainfo'))).get('classes')
    is_coco = classes is not None and tuple(classes) == CocoDataset.METAINFO['classes']
    remedies = [
        *([_COCO_DOWNLOAD.format(root=root or 'data/coco')] if is_coco else []),
        _OTHER_ROOT,
        _QUICK_START,
    ]
    ann_file = dataset.get('ann_file')
    if ann_file:
        ann_file = osp.join(root, ann_file)
        _require(osp.isfile(ann_file), f'{split} annotation file {ann_file} not found', ann_file, remedies)
    for prefix in dataset.get('data_prefix', {}).values():
        folder = osp.join(root, prefix)
        _require(osp.isdir(folder), f'{split} image folder {folder} not found', folder, remedies)
    if ann_file and classes and issubclass(dataset_class, CocoDataset) and osp.isfile(ann_file):
        folder = osp.join(root, dataset.get('data_prefix', {}).get('img', ''))
        _check_annotations(ann_file, folder, classes, split)


def _require(is_there: bool, problem: str, path: str, remedies: Sequence[str]) -> None:
    # mmengine's file backends read remote paths; only they know what is there.
    if not is_there and '://' not in path:
        raise DataError('\n'.join([problem + '.', *remedies]))


def _check_annotations(ann_file: str, folder: str, classes: Sequence[str], split: str) -> None:
    if osp.getsize(ann_file) > MAX_PARSED_BYTES:
        return
    try:
        with open(ann_file) as file:
            content = json.load(file)
        categories = {category['id']: category['name'] for category in content['categories']}
        # Test sets are published without annotations.
        annotations = content.get('annotations', []) if split == 'test' else content['annotations']
        labelled = {annotation['category_id'] for annotation in annotations}
        only_crowds = all(annotation.get('iscrowd') for annotation in annotations)
        images = content['images']
        files = [osp.join(folder, image['file_name']) for image in images[:: len(images) // MAX_IMAGES + 1]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f'{split} annotation file {ann_file} is not COCO JSON: {error!r}') from error
    if not images:
        raise DataError(f'{split} annotation file {ann_file} holds no images.')
    missing = [file for file in files if not osp.exists(file)]
    if missing and '://' not in folder:
        raise DataError(
            f'{split} annotation file {ann_file} names images that are not there, {missing[0]} for one '
            f'({len(missing)} of {len(files)} looked for). Unpack the images there, or correct '
            'data_prefix=dict(img=…) of the dataset.'
        )
    if not labelled and split == 'test':
        return
    if not labelled:
        raise DataError(f'{split} annotation file {ann_file} holds {len(images)} images but no annotations.')
    if only_crowds:
        raise DataError(
            f'{split} annotation file {ann_file}: all of its {len(annotations)} annotations are crowds '
            '(iscrowd=1), which neither train nor count. Set iscrowd to 0 where one object is meant.'
        )
    if not {categories.get(category_id) for category_id in labelled} & set(classes):
        raise DataError(
            f'{split} annotation file {ann_file}: none of its categories ({_some(categories.values())}) '
            f"is among the config's {len(classes)} classes ({_some(classes)}). Set metainfo=dict(classes=…) "
            'in the dataset and num_classes in the heads.'
        )


def _some(names: Sequence[str]) -> str:
    names = list(names)
    return ', '.join(names[:5]) + (', …' if len(names) > 5 else '')
