"""Makes slab_det a package of mmengine, so that ``slab_det::folder/file.py`` names its configs."""

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
    """Fills mmdet's registries; mmengine calls it before it looks for a name in the scope of slab_det."""
    for registry in REGISTRIES:
        registry.import_from_location()


def register_scope() -> None:
    """Adds slab_det to mmengine's table of packages, and to each of mmdet's registries a child with the scope slab_det.

    A config that inherits from ``slab_det::...`` has this scope; the parent registries hold our classes and mmdet's.
    """
    MODULE2PACKAGE['slab_det'] = 'slab_det'
    for registry in REGISTRIES:
        Registry(registry.name, scope='slab_det', parent=registry)
    # mmengine imports the registries of a scope, and register_all_modules, under these names.
    sys.modules['slab_det.registry'] = sys.modules['slab_det.utils'] = sys.modules[__name__]


def register_on_demand(registry: Registry, *modules: str) -> None:
    """Makes a registry import modules, whose classes register themselves, before its first look-up."""
    for module in modules if registry._imported else ():
        import_module(module)
    # Locations are an argument of the constructor, and mmdet has made this registry already.
    registry._locations = [*modules, *registry._locations]


def enter_scope(cfg: Config) -> None:
    """Makes the ``default_scope`` of a config, or else mmdet, the scope in which mmengine looks names up."""
    # In Python-style configs default_scope may be None.
    init_default_scope(cfg.get('default_scope') or 'mmdet')
