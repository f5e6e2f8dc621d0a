"""Quantizes an exported file to int8 weights and activations, statically, calibrated on images."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.logging import MMLogger

from slab_det.common.errors import ExportError
from slab_det.common.files import whole_file
from slab_det.export.equalize import MOST_NOISE, RANGE_IMAGES, equalize
from slab_det.export.extras import import_extra
from slab_det.export.in_onnxruntime import in_file_order
from slab_det.export.int8_sums import cuts_off_int8_sums
from slab_det.export.loaded_file import METADATA_KEY, file_precision, read_exported
from slab_det.families import EXPORTED
from slab_det.precisions import EXPORT_RUNTIMES

# Parts of the node names of layers that stay in float32. The first layer reads pixels, and is a hundredth of the work.
# The others predict boxes and masks: one int8 step of a delta moves a large anchor by pixels.
FLOAT_LAYERS = ('projection', *(layer for family in EXPORTED for layer in family.predictors))
OPERATORS_WITH_WEIGHTS = ('Conv', 'ConvTranspose', 'Gemm', 'MatMul')


def quantize_onnx(
    source: str | Path, target: str | Path, images: Iterable[np.ndarray], reduce_range: bool | None = None
) -> list[str]:
    """Writes a file whose convolutions and linear layers run in int8, with one scale per output channel.

    Only layers with weights are quantized; docs/deploy.md says what stays in float32.

    Args:
        source: A file that :func:`slab_det.export.export_onnx` wrote.
        target: The new file.
        images: Calibration images, (1, 3, H, W), float32, 0 to 255: training images as inference sees them.
        reduce_range: Round weights to 7 bits, as CPUs without VNNI instructions need them, instead of 8, which are
            nearer to float32. None: 7 bits if a runtime on this machine needs them.

    Returns:
        The names of the nodes that were quantized.

    Raises:
        ExportError: If ``source`` is no exported file in float32, there is no image, or a package is not installed.
    """
    onnx = import_extra('onnx')
    exported, metadata = read_exported(source)
    properties = {entry.key: entry.value for entry in exported.metadata_props}
    precision = file_precision(metadata)
    if precision != 'float32':
        raise ExportError(f'{source} is in {precision}: quantize the float32 file')
    quantization = import_extra('onnxruntime.quantization')
    if reduce_range is None:
        reduce_range = any(cuts_off_int8_sums(runtime) for runtime in EXPORT_RUNTIMES if find_spec(runtime))

    class Reader(quantization.CalibrationDataReader):
        def __init__(self, images: Iterable[np.ndarray]) -> None:
            self.inputs = ({'image': image} for image in images)

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.inputs, None)

    with whole_file(target) as name, tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / 'prepared.onnx'
        _fold_constants(source, prepared)
        model = onnx.load(prepared)
        nodes, images = _find_quantized(model.graph), iter(images)
        first = [*islice(images, RANGE_IMAGES)]
        if not first:
            raise ExportError('there is no calibration image: give about a hundred')
        lost = equalize(model, nodes, first)[1]
        if lost:
            nodes = [node for node in nodes if node not in lost]
            MMLogger.get_current_instance().warning(
                f'{len(lost)} layers stay in float32, because the rounding noise of int8 would be more than '
                f'{MOST_NOISE:.0%} of the variance of their output: {", ".join(lost)}; where LayerNorms '
                'were absorbed, absorb with --norms remove --int8'
            )
        onnx.save(model, prepared)
        if nodes:
            reader = Reader(chain(first, images))
            with in_file_order():
                quantization.quantize_static(
                    prepared,
                    name,
                    reader,
                    quant_format=quantization.QuantFormat.QDQ,
                    per_channel=True,
                    reduce_range=reduce_range,
                    activation_type=quantization.QuantType.QUInt8,
                    weight_type=quantization.QuantType.QInt8,
                    nodes_to_quantize=nodes,
                    # With quantized outputs, the GELU that follows would run as four kernels instead of one.
                    extra_options={'OpTypesToExcludeOutputQuantization': ['Gemm', 'MatMul']},
                )
        else:
            # Without names, ONNX Runtime would quantize every layer.
            onnx.save(model, name)
        quantized = onnx.load(name)
        metadata |= dict(int8_weight_bits=7 if reduce_range else 8)
        onnx.helper.set_model_props(quantized, {**properties, METADATA_KEY: json.dumps(metadata)})
        name.write_bytes(quantized.SerializeToString())
    return nodes


def _find_quantized(graph: Any) -> list[str]:
    """The names of the nodes with weights, without those in ``FLOAT_LAYERS``."""
    weights = {tensor.name for tensor in graph.initializer}
    return [
        node.name
        for node in graph.node
        if node.op_type in OPERATORS_WITH_WEIGHTS
        and weights.intersection(node.input[:2])
        and not any(part in node.name for part in FLOAT_LAYERS)
    ]


def _fold_constants(source: str | Path, target: Path) -> None:
    """Writes a file in which weights that the graph computes, such as kernels of linear attention, are constants."""
    onnxruntime = import_extra('onnxruntime')
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(target)
    onnxruntime.InferenceSession(str(source), options, providers=['CPUExecutionProvider'])
