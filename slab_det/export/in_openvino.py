"""Runs exported files in OpenVINO."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

import numpy as np

from slab_det.common.errors import ExportError
from slab_det.export.extras import import_extra, limit_threads
from slab_det.machine import openvino_core

# OpenVINO's names of precisions.
HINTS = {'float32': 'f32', 'bfloat16': 'bf16'}


def load(model: str | bytes, threads: int, precision: str = 'float32') -> Callable[[np.ndarray], list[np.ndarray]]:
    """Loads a file, or its content; returns the function from its input to its outputs.

    Raises:
        ExportError: If OpenVINO cannot compute the file in this precision on this CPU.
    """
    options = {'INFERENCE_PRECISION_HINT': HINTS[precision], 'PERFORMANCE_HINT': 'LATENCY'}
    if limit_threads(threads):
        options['INFERENCE_NUM_THREADS'] = limit_threads(threads)
    import_extra('openvino')
    core = openvino_core()
    try:
        request = core.compile_model(core.read_model(model), 'CPU', options).create_infer_request()
    except RuntimeError as error:
        if precision == 'float32':
            raise
        reason = str(error).strip().splitlines()[-1].strip()
        raise ExportError(
            f'OpenVINO cannot compute this file in {precision} on this CPU ({reason}); use float32'
        ) from error
    lock = Lock()

    def run(image: np.ndarray) -> list[np.ndarray]:
        # A request serves one thread at a time, and the next image overwrites its memory.
        with lock:
            return [np.array(value) for value in request.infer({'image': image}).to_tuple()]

    return run
