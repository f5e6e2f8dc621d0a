"""Runs exported files in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from slab_det.export.extras import import_extra, limit_threads


def start(model: str | bytes, threads: int, precision: str = 'f32') -> Callable[[np.ndarray], list[np.ndarray]]:
    """Loads a file, or its content; returns the function from its input to its outputs.

    ``precision`` is 'f32' alone: ONNX Runtime computes a file in the file's own precision.
    """
    onnxruntime = import_extra('onnxruntime')
    options = onnxruntime.SessionOptions()
    # Errors alone: its warnings name each float16 node of constants that it has no CPU kernel to compute beforehand.
    options.log_severity_level = 3
    options.intra_op_num_threads = limit_threads(threads)
    session = onnxruntime.InferenceSession(model, options, providers=['CPUExecutionProvider'])
    return lambda image: session.run(None, {'image': image})
