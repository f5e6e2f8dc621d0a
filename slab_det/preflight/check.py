"""Checks that a config's data exists and fits the config, before training or testing starts."""

import os.path as osp
from collections.abc import Iterator, Sequence
from copy import deepcopy

from mmdet.datasets import BaseDetDataset, CocoDataset
from mmdet.registry import DATASETS
from mmengine.config import Config, ConfigDict
from torch import nn
from torch.utils.data import Dataset

from slab_det.common.config import type_name, walk_datasets
from slab_det.common.distributed import unwrap
from slab_det.common.errors import ConfigError, DataError, name_some
from slab_det.data.synthetic import SyntheticShapes
from slab_det.preflight.annotations import read_coco
from slab_det.preflight.check_coco import (
    CheckedDataset,
    check_coco_dataset,
    check_evaluator,
    check_path,
    is_coco_metric,
    is_readable,
    is_remote,
)
from slab_det.preflight.classes import check_classes, classes_of_meta, metainfo_of, names_classes_in_text
from slab_det.runtime.registries import enter_scope

SPLITS = ('train', 'val', 'test')
HEAD_NAMES = ('head', 'bbox_head', 'mask_head', 'panoptic_head')


def check_data(cfg: Config, splits: Sequence[str] = SPLITS) -> None:
    """Raises an error if files of datasets or evaluators are missing, or COCO annotations do not fit.

    They must fit the config, their images, the classes of the training split, and what mmdet and pycocotools read.
    Remote paths (``s3://…``, ``backend_args``) and generated images are not checked.

    Args:
        cfg: A config with ``<split>_dataloader`` entries; absent ones are skipped.
        splits: The splits that will be used, of 'train', 'val' and 'test'.

    Raises:
        DataError: Naming the split, the file, and what to do about it.
        ConfigError: If the config of a dataset or evaluator cannot work with any file.
    """
    enter_scope(cfg)
    for split in splits:
        check_class_order(cfg, split)
        evaluators = _evaluators(cfg, split)
        # An evaluator without ann_file reads the masks of the dataset.
        with_masks = any('segm' in evaluator.get('metric', ()) for evaluator in evaluators)
        found = [_check_dataset(dataset, split, with_masks) for dataset in _file_datasets(cfg, split)]
        if split == 'train' and found and None not in found and not sum(dataset.num_objects for dataset in found):
            raise DataError(
                f'{found[0].coco.where}: there is no object of the classes ({name_some(found[0].classes)}) in the '
                'training split, so nothing could be learnt; correct ann_file=… or metainfo=dict(classes=…)'
            )
        for evaluator in evaluators:
            if evaluator.get('ann_file') and not is_remote(evaluator):
                check_path(evaluator['ann_file'], f'{split} evaluator: annotation file', 'ann_file=…')
            if split != 'train' and not evaluator.get('ann_file') and is_coco_metric(evaluator):
                _check_instances(cfg, split)
        # MultiDatasetsEvaluator has one metric for each dataset.
        is_multiple = 'metrics' in (cfg.get(f'{split}_evaluator') or ())
        for index, evaluator in enumerate(evaluators):
            datasets = found[index : index + 1] if is_multiple and len(found) > 1 else found
            if datasets and None not in datasets:
                check_evaluator(evaluator, datasets, split)


def check_evaluation(cfg: Config, dataset_meta: dict | None, source: str) -> None:
    """Checks that AP of a trained detector can be measured on the validation images of a config.

    Args:
        cfg: A config.
        dataset_meta: What the checkpoint of the detector holds of its classes.
        source: The checkpoint, for messages.

    Raises:
        ConfigError, DataError: If there is no validation set, or see :func:`check_data` and :func:`check_class_order`.
    """
    if not (cfg.get('val_dataloader') and cfg.get('val_evaluator')):
        raise ConfigError('eval needs a config with val_dataloader and val_evaluator; add them, or leave eval out')
    check_data(cfg, ('val',))
    check_class_order(cfg, 'val', classes_of_meta(dict(dataset_meta=dataset_meta)) or (), source)


def check_class_order(cfg: Config, split: str, expected: Sequence[str] | None = None, source: str = '') -> None:
    """Checks that the datasets of a split have the classes of the training, or of a detector, in the same order.

    mmdet's labels are numbers: a label stands for the name with its index in ``classes``, whatever a dataset calls it.

    Args:
        cfg: A config with ``<split>_dataloader``. Detectors that find what a text names are not checked.
        split: 'train', 'val' or 'test'.
        expected: Names of the labels of the detector; None means those of ``train_dataloader``.
        source: Where ``expected`` comes from, for the message.

    Raises:
        DataError: If classes or their order differ.
    """
    enter_scope(cfg)
    if names_classes_in_text(cfg.get('model')):
        return
    if expected is None:
        known = [classes for dataset in _file_datasets(cfg, 'train') if (classes := _classes_of(dataset, 'train'))]
        expected, source = known[0] if known else None, 'the training split'
    for dataset in _file_datasets(cfg, split):
        ann_file = dataset.get('ann_file') and osp.join(dataset.get('data_root') or '', dataset.ann_file)
        check_classes(expected, _classes_of(dataset, split), f'{split} dataset', source, ann_file)


def check_num_classes(model: nn.Module, dataset: Dataset, split: str) -> None:
    """Raises DataError if a head of ``model`` and the dataset of a split differ in the number of classes.

    mmdet would predict classes that do not exist, or train objects of surplus classes as background.
    """
    model = unwrap(model)
    metainfo = metainfo_of(dataset)
    classes = metainfo.get('classes')
    # In Grounding DINO num_classes is the length of the text.
    if not classes or names_classes_in_text(model):
        return
    # The box heads of panoptic detectors predict thing classes only.
    numbers = (len(classes), len(metainfo.get('thing_classes', classes)))
    for name, module in model.named_modules():
        num_classes = getattr(module, 'num_classes', None)
        # The heads of a cascade are numbered.
        is_head = name.rstrip('.0123456789').rpartition('.')[2] in HEAD_NAMES
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
    """The metrics of a split, also those inside an evaluator of mmengine or mmdet."""
    evaluators = cfg.get(f'{split}_evaluator') or []
    if 'metrics' in evaluators:
        evaluators = evaluators['metrics']
    return [*evaluators] if isinstance(evaluators, (list, tuple)) else [evaluators]


def _check_instances(cfg: Config, split: str) -> None:
    """Raises ConfigError if samples would not hold the objects that a CocoMetric without ``ann_file`` reads there."""
    for dataset in _file_datasets(cfg, split):
        for step in dataset.get('pipeline') or ():
            is_pack = isinstance(step, dict) and type_name(step['type']) == 'PackDetInputs'
            if is_pack and 'instances' not in step.get('meta_keys', ()):
                raise ConfigError(
                    f'{split}_evaluator: a CocoMetric without ann_file reads the objects from the samples, and '
                    f'PackDetInputs of {split}_dataloader does not put them there: set ann_file=…, or, as for a '
                    "ConcatDataset, add 'instances' to its meta_keys"
                )


def _dataset_class(dataset: ConfigDict, split: str) -> type:
    # The runner finds the class in the same way.
    with DATASETS.switch_scope_and_registry(dataset.get('_scope_')) as registry:
        kind = registry.get(dataset.type) if isinstance(dataset.type, str) else dataset.type
    if kind is None:
        raise DataError(f'{split}_dataloader: no dataset is called {dataset.type!r}')
    return kind


def _classes_of(dataset: ConfigDict, split: str) -> tuple:
    """The class names of a dataset; none where nothing but its files tells them."""
    kind, metainfo = _dataset_class(dataset, split), dataset.get('metainfo')
    # ImageFolder has the names of the detector, and classification datasets may find theirs in a folder.
    metainfo = kind._load_metainfo(deepcopy(metainfo)) if issubclass(kind, BaseDetDataset) else metainfo or {}
    return tuple(metainfo.get('classes') or ())


def _check_dataset(dataset: ConfigDict, split: str, with_masks: bool) -> CheckedDataset | None:
    """Checks the files of a dataset; returns what was found in its annotations if they are COCO's, else None."""
    kind = _dataset_class(dataset, split)
    # Classification datasets report missing files themselves.
    if issubclass(kind, SyntheticShapes) or not issubclass(kind, BaseDetDataset) or is_remote(dataset):
        return None
    root, prefixes = dataset.get('data_root') or '', dataset.get('data_prefix') or {}
    if not isinstance(prefixes, dict):
        raise ConfigError(
            f'{split}_dataloader: data_prefix={prefixes!r} is no dictionary: write data_prefix=dict(img={prefixes!r})'
        )
    steps = [step for step in dataset.get('pipeline') or () if isinstance(step, dict)]
    ann_file = osp.join(root, dataset.get('ann_file') or '')
    if dataset.get('ann_file'):
        check_path(ann_file, f'{split} annotation file', 'ann_file=…')
    for prefix in () if any(map(is_remote, steps)) else prefixes.values():
        check_path(osp.join(root, prefix), f'{split} image folder', 'data_prefix=dict(img=…)')
    classes = _classes_of(dataset, split)
    # LVIS and the panoptic datasets have other annotation formats.
    methods = ('load_data_list', 'parse_data_info')
    reads_coco = all(getattr(kind, name, None) is getattr(CocoDataset, name) for name in methods)
    if not (reads_coco and classes and is_readable(ann_file)):
        return None
    coco = read_coco(ann_file, f'{split} annotation file {ann_file}')
    if 'img' not in prefixes:
        raise DataError(
            f"{split} dataset: it has no data_prefix=dict(img=…): the folder of its images, or '' for the root"
        )
    folder = osp.join(root, prefixes['img'])
    return check_coco_dataset(coco, ann_file, dataset, folder, classes, split, with_masks)
