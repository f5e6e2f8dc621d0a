"""Finds out whether a runtime adds int8 products without overflow on this CPU.

CPUs without VNNI instructions add two products of 8 bits in 16 bits: 2 * 255 * 127 does not fit and is cut off.
2 * 255 * 64 fits: weights of 7 bits (ONNX Runtime's ``reduce_range``) are right on every CPU.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from slab_det.export.extras import find_loader, import_extra

SIDE = 64


@lru_cache(None)
def cuts_off_int8_sums(runtime: str) -> bool:
    """Whether a runtime needs weights of 7 bits: whether it computes a product of largest int8 values wrong here."""
    run = find_loader(runtime)(largest_product(), threads=1, precision='float32')
    found = run(np.full((SIDE, SIDE), 255, np.float32))[0]
    return not np.allclose(found, SIDE * 255 * 127, rtol=1e-3)


def largest_product() -> bytes:
    """An ONNX file that quantizes its input to 8 bits and multiplies it with int8 weights, as quantized layers do."""
    onnx = import_extra('onnx')
    make, array = onnx.helper, onnx.numpy_helper.from_array
    constants = {
        'scale': np.array(1, np.float32),
        'zero': np.array(0, np.uint8),
        'weight': np.full((SIDE, SIDE), 127, np.int8),
        'weight_scale': np.ones(SIDE, np.float32),
        'weight_zero': np.zeros(SIDE, np.int8),
    }
    nodes = [
        make.make_node('QuantizeLinear', ['image', 'scale', 'zero'], ['quantized']),
        make.make_node('DequantizeLinear', ['quantized', 'scale', 'zero'], ['x']),
        make.make_node('DequantizeLinear', ['weight', 'weight_scale', 'weight_zero'], ['w'], axis=1),
        make.make_node('MatMul', ['x', 'w'], ['product']),
    ]
    values = [make.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [SIDE, SIDE]) for name in ('image', 'product')]
    tensors = [array(value, name) for name, value in constants.items()]
    graph = make.make_graph(nodes, 'largest_product', values[:1], values[1:], tensors)
    # The versions of the exported files, which old runtimes read.
    return make.make_model(graph, opset_imports=[make.make_opsetid('', 17)], ir_version=8).SerializeToString()
