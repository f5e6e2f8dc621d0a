"""The precisions of a detector: one table of runtime, device and precision, and what the machine must have for each.

Every command, ``load_detector``, ``optimize`` and the export read it. A new precision is a row of :data:`TABLE`; a new
runtime of exported files is an entry of :data:`RUNTIMES`, its rows, and the module that the entry names. Imports no
torch, so that ``--help`` lists precisions and runtimes at once.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import NamedTuple

from slab_det.machine import MACHINE


class Runtime(NamedTuple):
    """What runs a detector.

    Attributes:
        title: Its name in tables.
        options: The options of :func:`slab_det.load_detector` that it takes.
        module: The module whose ``load`` loads an exported file; '' for PyTorch, which runs checkpoints.
        packages: What must be installed besides PyTorch.
        extra: The extra of slab_det that installs them.
    """

    title: str
    options: tuple[str, ...] = ()
    module: str = ''
    packages: tuple[str, ...] = ()
    extra: str = ''


class Need(NamedTuple):
    """What a machine must have, in words, and whether this one has it."""

    name: str
    is_met: Callable[[], bool]


class Row(NamedTuple):
    """A precision of a runtime on a device.

    Attributes:
        runtime: A key of :data:`RUNTIMES`.
        device: 'cpu' or 'cuda'.
        precision: Of most layers.
        need: What the machine must have, besides packages. Without it PyTorch on a CPU still computes, but slowly.
        is_tried: Whether ``optimize`` measures it.
        is_option: Whether :func:`slab_det.export.load_runtime` takes it as ``precision``; 'float32' computes a file
            in the precision that it was written in.
        is_written: Whether :func:`slab_det.export.export_onnx` writes files in it; int8 files are made of these.
    """

    runtime: str
    device: str
    precision: str
    need: Need | None = None
    is_tried: bool = True
    is_option: bool = False
    is_written: bool = False


FILE_OPTIONS = ('threads', 'precision')
RUNTIMES = {
    'eager': Runtime('eager'),
    'torch': Runtime('deployed', ('dtype',)),
    'onnxruntime': Runtime(
        'ONNX Runtime', FILE_OPTIONS, 'slab_det.export.in_onnxruntime', ('onnx', 'onnxruntime'), extra='onnx'
    ),
    'openvino': Runtime(
        'OpenVINO', FILE_OPTIONS, 'slab_det.export.in_openvino', ('onnx', 'openvino'), extra='openvino'
    ),
}
GPU = Need('a GPU that PyTorch sees', lambda: MACHINE.has_gpu)
FLOAT16 = Need('a CPU that multiplies float16 (AVX-512 FP16)', lambda: MACHINE.multiplies_float16)
BFLOAT16 = Need('a CPU that multiplies bfloat16 (AVX-512)', lambda: MACHINE.multiplies_bfloat16)
OPENVINO_BFLOAT16 = Need('a CPU that multiplies bfloat16 in OpenVINO', lambda: 'BF16' in MACHINE.openvino_precisions)
# Half precision of the eager detector is autocast, which deploying beats. On CPUs with fast float16, bfloat16 is as
# fast, and has the range of float32.
TABLE = (
    Row('eager', 'cpu', 'float32'),
    Row('eager', 'cpu', 'float16', FLOAT16, is_tried=False),
    Row('eager', 'cpu', 'bfloat16', BFLOAT16, is_tried=False),
    Row('eager', 'cuda', 'float32', GPU),
    Row('eager', 'cuda', 'float16', GPU, is_tried=False),
    Row('eager', 'cuda', 'bfloat16', GPU, is_tried=False),
    Row('torch', 'cpu', 'float32'),
    Row('torch', 'cpu', 'bfloat16', BFLOAT16),
    Row('torch', 'cpu', 'float16', FLOAT16, is_tried=False),
    Row('torch', 'cuda', 'float32', GPU),
    Row('torch', 'cuda', 'float16', GPU),
    Row('torch', 'cuda', 'bfloat16', GPU, is_tried=False),
    Row('onnxruntime', 'cpu', 'float32', is_option=True, is_written=True),
    Row('onnxruntime', 'cpu', 'int8'),
    # For programs that run the file on a GPU: on a CPU ONNX Runtime casts around most operators.
    Row('onnxruntime', 'cpu', 'float16', is_tried=False, is_written=True),
    Row('openvino', 'cpu', 'float32', is_option=True),
    Row('openvino', 'cpu', 'bfloat16', OPENVINO_BFLOAT16, is_option=True),
    Row('openvino', 'cpu', 'int8'),
)
EXPORT_RUNTIMES = tuple(name for name, runtime in RUNTIMES.items() if runtime.module)


def precisions_of(runtime: str) -> tuple[str, ...]:
    """The precisions of a runtime, on any device."""
    return tuple(dict.fromkeys(row.precision for row in TABLE if row.runtime == runtime))


def precision_options(runtime: str) -> tuple[str, ...]:
    """What ``precision`` of :func:`slab_det.export.load_runtime` may be with a runtime of exported files."""
    return tuple(row.precision for row in TABLE if row.runtime == runtime and row.is_option)


def written_precisions() -> tuple[str, ...]:
    """The precisions in which :func:`slab_det.export.export_onnx` writes files."""
    return tuple(dict.fromkeys(row.precision for row in TABLE if row.is_written))


def find_row(runtime: str, device: str, precision: str) -> Row | None:
    """The row of a precision of a runtime on a device; None if it does not exist."""
    return next((row for row in TABLE if row[:3] == (runtime, device, precision)), None)


def find_missing(runtime: str, device: str, precision: str) -> str:
    """Returns what this machine lacks for a precision of a runtime on a device, or ''."""
    row = find_row(runtime, device, precision)
    if row is None:
        return f'another runtime or device: {runtime} does not compute {precision} on {device}'
    absent = [name for name in RUNTIMES[runtime].packages if find_spec(name) is None]
    if absent:
        remedy = f'pip install -e ".[{RUNTIMES[runtime].extra}]"'
        return f'the package{"s" * (len(absent) > 1)} {" and ".join(absent)} ({remedy})'
    return '' if row.need is None or row.need.is_met() else row.need.name
