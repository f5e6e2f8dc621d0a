"""Registers the scope slab_det with mmengine, so that ``slab_det::folder/file.py`` names a config."""

import sys
from importlib import import_module

import mmdet.registry
from mmengine.config import Config
from mmengine.config.utils import MODULE2PACKAGE
from mmengine.registry import Registry, init_default_scope

REGISTRIES = [
    registry
    for registry in vars(mmdet.registry).values()
    if isinstance(registry, Registry) and registry.scope == 'mmdet'
]


def register_all_modules(init_default_scope: bool = False) -> None:
    """Fills mmdet's registries; mmengine calls it before a registry's first look-up in the scope slab_det."""
    for registry in REGISTRIES:
        registry.import_from_location()


def register_scope() -> None:
    """Adds slab_det to mmengine's table of packages, and a child with the scope slab_det to every registry of mmdet.

    A config that inherits from ``slab_det::...`` has this scope. The classes of slab_det and mmdet are in the parents.
    """
    MODULE2PACKAGE['slab_det'] = 'slab_det'
    for registry in REGISTRIES:
        Registry(registry.name, scope='slab_det', parent=registry)
    # mmengine imports slab_det.registry, and slab_det.utils for register_all_modules.
    sys.modules['slab_det.registry'] = sys.modules['slab_det.utils'] = sys.modules[__name__]


def register_on_demand(registry: Registry, *modules: str) -> None:
    """Makes a registry import ``modules``, which register their classes, before its first look-up."""
    for module in modules if registry._imported else ():
        import_module(module)
    # mmdet has constructed the registry already, so its argument ``locations`` cannot be passed.
    registry._locations = [*modules, *registry._locations]


def enter_scope(cfg: Config) -> None:
    """Sets mmengine's default scope to the ``default_scope`` of a config, or to mmdet."""
    # default_scope may be None in Python-style configs.
    init_default_scope(cfg.get('default_scope') or 'mmdet')
