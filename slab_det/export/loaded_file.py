"""Loads an exported file in ONNX Runtime or OpenVINO."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.logging import MMLogger
from torch import Tensor

from slab_det.common.errors import ExportError
from slab_det.common.numbers import check_threads
from slab_det.export.extras import find_loader, import_extra
from slab_det.export.int8_sums import cuts_off_int8_sums
from slab_det.precisions import EXPORT_RUNTIMES, precision_options

METADATA_KEY = 'slab_det'
Run = Callable[[np.ndarray], dict[str, np.ndarray]]


def crop_to_multiples(image: np.ndarray | Tensor, divisor: int) -> np.ndarray | Tensor:
    """Crops an image (..., H, W) to the largest multiples of ``divisor``."""
    height, width = (side // divisor * divisor for side in image.shape[-2:])
    return image[..., :height, :width]


@dataclass(frozen=True)
class LoadedFile:
    """A loaded ONNX file. It is pickled as its path and options, and loads the file again where it is unpickled.

    Attributes:
        metadata: What :func:`slab_det.export.export_onnx` wrote into the file.
        run: Returns the outputs by name for an image (1, 3, H, W), float32, 0 to 255, in the channel order of the
            pipeline.
        arguments: The arguments of :func:`load_runtime` that load the same.
    """

    metadata: dict
    run: Run
    arguments: tuple

    @property
    def precision(self) -> str:
        """The precision in which the file was written."""
        return file_precision(self.metadata)

    def with_threshold(self, score_thr: float) -> LoadedFile:
        """Loads the file with another score threshold; raises ExportError if the file has none."""
        return load_runtime(*self.arguments[:-1], score_thr)

    def __reduce__(self) -> tuple:
        # A loaded file has threads and memory of its process.
        return load_runtime, self.arguments

    def __deepcopy__(self, memo: dict) -> LoadedFile:
        # Threads share a loaded file, and so can copies.
        return self


def load_runtime(
    path: str | Path,
    runtime: str = 'onnxruntime',
    threads: int = 0,
    precision: str = 'float32',
    score_thr: float | None = None,
) -> LoadedFile:
    """Loads an exported file.

    Args:
        path: The file that :func:`export_onnx` or :func:`quantize_onnx` wrote.
        runtime: 'onnxruntime' or 'openvino'.
        threads: CPU threads; 0 lets the runtime choose, among the processors that this process may use.
        precision: 'float32' or, with OpenVINO, 'bfloat16'; an int8 file has its own, and 'float32' for the rest.
        score_thr: Detections with this score or a smaller one are dropped; None for the threshold of the file.

    Returns:
        The loaded file, whose ``run`` computes the outputs for an image.

    Raises:
        ExportError: If the runtime is unknown or not installed, this process may not use so many threads, or the file
            is missing, damaged, not from slab-det, or without the threshold to change.
    """
    _check_options(runtime, threads, precision)
    model, metadata = read_exported(path)
    # Absolute: whoever unpickles the loaded file may be in another folder.
    arguments = os.path.abspath(path), runtime, threads, precision, score_thr
    if metadata.get('int8_weight_bits') == 8 and cuts_off_int8_sums(runtime):
        # The logger shows it once, also where ``with_threshold`` loads the file again by its absolute path.
        MMLogger.get_current_instance().warning(
            f'{arguments[0]}: {runtime} cuts off sums of int8 products on this CPU, as CPUs without VNNI instructions '
            'do, and the file may find other objects here: export it again with --int8 --reduce-range, or use another '
            'runtime'
        )
    # OpenVINO may call an output by the name of its operator.
    names = [output.name for output in model.graph.output]
    divisor = metadata['image']['size_divisor']
    source = str(path) if score_thr is None else _set_threshold(path, score_thr)
    run = find_loader(runtime)(source, threads, precision)

    def run_named(image: np.ndarray) -> dict[str, np.ndarray]:
        height, width = image.shape[2:]
        if height % divisor or width % divisor:
            raise ExportError(
                f'{path} takes images whose sides are multiples of {divisor}, as its detector does, not {height}x'
                f'{width}: set pad_size_divisor={divisor} in the data_preprocessor of its config, and export again'
            )
        return dict(zip(names, run(image), strict=True))

    return LoadedFile(metadata, run_named, arguments)


def _check_options(runtime: str, threads: int, precision: str) -> None:
    """Raises ExportError for options of :func:`load_runtime` that no machine, or not this process, can follow."""
    if runtime not in EXPORT_RUNTIMES:
        raise ExportError(f'runtime {runtime!r} is not one of {", ".join(EXPORT_RUNTIMES)}')
    if precision not in precision_options(runtime):
        others = [name for name in EXPORT_RUNTIMES if precision in precision_options(name)]
        raise ExportError(
            f'precision {precision!r} is not one of {", ".join(precision_options(runtime))}, which {runtime} computes'
            + ''.join(f': use runtime {name}' for name in others[:1])
        )
    check_threads(threads, ExportError, least=0, name='threads=')


def read_exported(path: str | Path) -> tuple[Any, dict]:
    """The ``onnx.ModelProto`` of an exported file, and what the export wrote into it; ExportError for other files."""
    if not Path(path).is_file():
        raise ExportError(f'there is no file {path}; give one that slab-det export wrote')
    onnx = import_extra('onnx')
    # protobuf comes with onnx.
    from google.protobuf.message import DecodeError

    try:
        model = onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise ExportError(
            f'{path} was not written by slab-det export, or was cut off while it was written or copied: export it again'
        ) from error
    text = next((entry.value for entry in model.metadata_props if entry.key == METADATA_KEY), None)
    if text is None:
        raise ExportError(f'{path} was not written by slab-det export')
    metadata = json.loads(text)
    if 'precision' not in metadata or 'size_divisor' not in metadata.get('image', {}):
        raise ExportError(f'{path} was written by slab-det export of an earlier version: export it again')
    return model, metadata


def file_precision(metadata: dict) -> str:
    """The precision in which a file with this metadata was written."""
    return 'int8' if 'int8_weight_bits' in metadata else metadata['precision']


def _set_threshold(path: str | Path, score_thr: float) -> bytes:
    """The content of an exported file with another score threshold."""
    onnx = import_extra('onnx')
    model = onnx.load(path)
    found = [tensor for tensor in model.graph.initializer if tensor.name.endswith('score_thr')]
    if len(found) != 1:
        raise ExportError(f'{path} has no score threshold that could be changed to {score_thr}; export it again')
    found[0].CopyFrom(onnx.numpy_helper.from_array(np.array(score_thr, np.float32), found[0].name))
    return model.SerializeToString()
