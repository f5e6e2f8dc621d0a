"""Packages that only an exported detector needs."""

from importlib import import_module
from types import ModuleType

from slab_det.runtime.errors import ExportError

EXTRAS = {'openvino': 'openvino'}


def need(name: str) -> ModuleType:
    """Imports a package of the extra 'onnx' or 'openvino'.

    Raises:
        ExportError: If it is not installed; says how to.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(name.partition('.')[0], 'onnx')
        raise ExportError(f'the package {error.name} is not installed: pip install -e ".[{extra}]"') from error
