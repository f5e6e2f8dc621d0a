"""Reads and edits the dictionaries of mmengine configs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import FunctionType

import mmengine.registry
from mmengine.config import Config, ConfigDict
from mmengine.config.lazy import LazyAttr, LazyObject
from mmengine.registry import Registry
from mmengine.utils import get_object_from_string

from slab_det.common.errors import ConfigError, config_errors

# Arguments of FusedDetector other than its model and the changes to it.
FUSED_KEYS = ('type', 'folds', 'channels')


def type_name(kind: str | Callable) -> str:
    """Returns the bare name of a config's ``type``: 'MaskRCNN' for 'mmdet.MaskRCNN', 'MaskRCNN' and the class."""
    return kind.rpartition('.')[2] if isinstance(kind, str) else kind.__name__


def open_config(config: str | Path | Config) -> Config:
    """Reads a config, or returns it as it is; ConfigError if it is missing or cannot be read."""
    if isinstance(config, Config):
        return config
    if not Path(config).is_file():
        raise ConfigError(f'{config}: there is no such config; check its name')
    with config_errors(str(config)):
        return Config.fromfile(config)


def to_values(cfg: Config) -> dict:
    """Copies a config to plain dictionaries, with registry names for the classes of a Python-style config.

    mmengine would write ``mmdet.models.losses.smooth_l1_loss.L1Loss``, which it cannot read where a module and a
    function share a name. Modules of other packages, whose classes nobody else would register, are added to
    ``custom_imports``.

    Raises:
        ConfigError: If a class or function has no name by which a written config could find it.
    """
    scope, modules = cfg.get('default_scope') or 'mmdet', []

    def rename(value: object, key: str = '') -> object:
        if isinstance(value, (LazyObject, LazyAttr)):
            value = value.build()
        if isinstance(value, dict):
            return {name: rename(part, name) for name, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(rename(part, key) for part in value)
        if key == 'type' and isinstance(value, str) and value.count('.') > 1:
            # As mmengine writes a Python-style config.
            value = _import_object(value) or value
        if not isinstance(value, (type, FunctionType)) or value.__module__ == 'builtins':
            return copy.deepcopy(value)
        name, module = find_name(value, scope), value.__module__
        # mmcv and mmdet look these up in mmcv.ops.
        if name is None and module.startswith('mmcv.ops'):
            return value.__name__
        path = f'{module}.{value.__qualname__}'
        if name is None and (key != 'type' or get_object_from_string(path) is not value):
            raise ConfigError(
                f'{cfg.filename or "config"}: {path}, the value of {key!r}, is not registered, so no written config '
                'could name it: decorate it with @MODELS.register_module(), or the like of another registry of mmengine'
            )
        if module.partition('.')[0] not in ('torch', 'mmcv', 'mmengine', scope):
            modules.append(module)
        return name or path

    imported = getattr(cfg, '_imported_names', ())
    values = {key: rename(value, key) for key, value in cfg.items() if key not in imported}
    if imported:
        # Names need a scope, and classes none.
        values['default_scope'] = scope
    if modules:
        add_imports(values, *modules)
    return values


def _import_object(path: str) -> object | None:
    """What a dotted path names, also where the module shares its name with a function of its package."""
    module, _, name = path.rpartition('.')
    with suppress(ImportError):
        return getattr(import_module(module), name, None)
    return None


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


def add_imports(cfg: dict, *modules: str) -> None:
    """Puts modules before the others in the ``custom_imports`` of a config, in place."""
    imports = cfg.get('custom_imports', {}).get('imports', [])
    imports = [imports] if isinstance(imports, str) else imports
    cfg['custom_imports'] = dict(imports=list(dict.fromkeys([*modules, *imports])), allow_failed_imports=False)


def find_name(kind: Callable, scope: str) -> str | None:
    """The name by which configs find a registered class or function, with its scope in front if ``scope`` needs it.

    Args:
        kind: The class or function.
        scope: The ``default_scope`` of the config.

    Returns:
        The name; None if nobody registered it.
    """
    found = None
    for root in vars(mmengine.registry).values():
        for registry in (root, *root._children.values()) if isinstance(root, Registry) else ():
            for name, registered in registry._module_dict.items():
                if registered is kind:
                    nearest = root._children.get(scope, root)._module_dict.get(name) or root._module_dict.get(name)
                    if nearest is kind:
                        return name
                    found = f'{registry.scope}.{name}'
    return found
