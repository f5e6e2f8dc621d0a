"""Imports that wait until somebody asks for a class: mmdet's models and datasets take seconds."""

import io
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

from mmengine.registry import Registry


def register_on_demand(registry: Registry, *modules: str) -> None:
    """Makes a registry import modules, whose classes register themselves, before it first looks for a name.

    So does a registry that is made with ``locations``; here it is mmdet's, which has its own.
    """
    if registry._imported:
        for module in modules:
            import_module(module)
    # mmengine takes locations when a registry is made, and has no public way to add one.
    registry._locations = [*registry._locations, *modules]


class SilentImport(MetaPathFinder):
    """Imports ``mmdet.datasets``, which prints that it cannot import the datasets of another product, silently."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != 'mmdet.datasets':
            return None
        spec = PathFinder.find_spec(fullname, path)
        execute = spec.loader.exec_module

        def execute_silently(module: ModuleType) -> None:
            with redirect_stdout(io.StringIO()):
                execute(module)

        spec.loader.exec_module = execute_silently
        return spec


sys.meta_path.insert(0, SilentImport())
