"""What exported files need besides PyTorch: packages, their threads, and the function of each that loads a file."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import numpy as np

from slab_det.common.errors import ExportError
from slab_det.machine import MACHINE
from slab_det.precisions import RUNTIMES

# Takes a file, or its content, the number of threads and the precision.
Loader = Callable[[str | bytes, int, str], Callable[[np.ndarray], list[np.ndarray]]]


def import_extra(name: str) -> ModuleType:
    """Imports a package of the extra 'onnx' or 'openvino'.

    Raises:
        ExportError: If it is not installed; the message says how to install it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        extra = RUNTIMES[name].extra if name in RUNTIMES else 'onnx'
        raise ExportError(f'the package {error.name} is not installed: pip install -e ".[{extra}]"') from error


def limit_threads(threads: int) -> int:
    """Returns the threads that a runtime is asked for: 0, its own choice, counts the host's cores."""
    is_limited = MACHINE.processors < (os.cpu_count() or 1)
    # Otherwise the runtime's choice is better: it leaves out the second thread of each core.
    return threads or (MACHINE.processors if is_limited else 0)


def find_loader(runtime: str) -> Loader:
    """The function that loads an exported file in a runtime, from the module that :data:`RUNTIMES` names."""
    return import_module(RUNTIMES[runtime].module).load
