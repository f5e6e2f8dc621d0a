"""Runs exported files in ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock

import numpy as np

from slab_det.export.extras import import_extra, limit_threads


def load(model: str | bytes, threads: int, precision: str = 'float32') -> Callable[[np.ndarray], list[np.ndarray]]:
    """Loads a file, or its content; returns the function from its input to its outputs.

    ``precision`` is 'float32' alone: ONNX Runtime computes a file in the file's own precision.
    """
    onnxruntime = import_extra('onnxruntime')
    options = onnxruntime.SessionOptions()
    # Errors alone: its warnings name each float16 node of constants that it has no CPU kernel to compute beforehand.
    options.log_severity_level = 3
    options.intra_op_num_threads = limit_threads(threads)
    session = onnxruntime.InferenceSession(model, options, providers=['CPUExecutionProvider'])
    return lambda image: session.run(None, {'image': image})


# Threads that change ONNX Runtime's class at the same time would each restore what the other one had put there.
_SESSION_OPTIONS = RLock()


@contextmanager
def in_file_order() -> Iterator[None]:
    """Makes ONNX Runtime run the nodes of a graph in the order of its file, in sessions that are made in the block.

    By default it runs outputs that no other node reads last. A graph with a probe behind each layer then holds the
    values of all layers at once, which are gigabytes. The order counts without graph optimizations alone. One thread at
    a time is in such a block.
    """
    onnxruntime = import_extra('onnxruntime')
    with _SESSION_OPTIONS:
        options = onnxruntime.SessionOptions

        class InFileOrder(options):
            def __init__(self) -> None:
                super().__init__()
                self.execution_order = onnxruntime.ExecutionOrder.PRIORITY_BASED

        # quantize_static makes its session itself.
        onnxruntime.SessionOptions = InFileOrder
        try:
            yield
        finally:
            onnxruntime.SessionOptions = options
