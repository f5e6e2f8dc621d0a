"""Reads and edits the dictionaries of mmengine configs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from mmengine.config import Config, ConfigDict

# Arguments of FusedDetector other than its model and the changes to it.
FUSED_KEYS = ('type', 'folds', 'channels', 'ffns')


def type_name(kind: str | Callable) -> str:
    """Returns the bare name of a config's ``type``: 'MaskRCNN' for 'mmdet.MaskRCNN', 'MaskRCNN' and the class."""
    return kind.rpartition('.')[2] if isinstance(kind, str) else kind.__name__


def to_values(cfg: Config) -> dict:
    """Copies a config to plain dictionaries, with bare names for the types of ``nms`` and ``roi_layer``.

    mmcv and mmdet look them up by bare name, but mmengine would write a Python-style config's ``'mmcv.ops.nms'``.
    """

    def rename(value: object, key: str = '') -> object:
        if isinstance(value, (list, tuple)):
            return type(value)(rename(part) for part in value)
        if not isinstance(value, dict):
            return value
        value = {name: rename(part, name) for name, part in value.items()}
        return dict(value, type=type_name(value['type'])) if key in ('nms', 'roi_layer') and 'type' in value else value

    return rename(copy.deepcopy(cfg).to_dict())


def walk_datasets(dataset: ConfigDict) -> Iterator[ConfigDict]:
    """Yields the config of a dataset, then the configs inside it, through every wrapper of mmengine and mmdet."""
    yield dataset
    for inner in dataset.get('datasets') or ([dataset['dataset']] if 'dataset' in dataset else []):
        yield from walk_datasets(inner)


def detector_config(model: dict) -> dict:
    """Returns the config of the detector inside any DistilledDetector and FusedDetector wrappers.

    Options beside the ``model`` of a FusedDetector, which it merges into it, are merged here too.
    """
    while (kind := type_name(model['type'])) in ('DistilledDetector', 'FusedDetector'):
        if kind == 'DistilledDetector':
            model = model['student']
            continue
        changes = {key: value for key, value in model.items() if key not in (*FUSED_KEYS, 'model') and value != {}}
        model = merge_changes(model['model'], **changes) if changes else model['model']
    return model


def merge_changes(model: dict, **changes: object) -> ConfigDict:
    """Returns a copy of a detector config, with ``changes`` merged as mmengine merges ``--cfg-options``."""
    cfg = Config(dict(model=copy.deepcopy(model)))
    cfg.merge_from_dict(dict(model=changes))
    return cfg.model


def drop_pretrained(model: dict) -> None:
    """Removes ``init_cfg`` and ``pretrained`` from a detector config and its backbone, in place."""
    for part in (model, model.get('backbone', {})):
        part.pop('init_cfg', None)
        part.pop('pretrained', None)


def import_slab_det(cfg: dict) -> None:
    """Adds slab_det to the ``custom_imports`` of a config, in place, so that mmdet finds slab_det's classes."""
    imports = cfg.get('custom_imports', {}).get('imports', [])
    imports = [imports] if isinstance(imports, str) else imports
    cfg['custom_imports'] = dict(imports=list(dict.fromkeys(['slab_det', *imports])), allow_failed_imports=False)
