"""W8A8: int8 weights and activations by static quantization, calibrated on images."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slab_det.deployment.export.packages import need

if TYPE_CHECKING:
    from onnx import ModelProto

# Layers that keep float32, by a part of their node's name.
FLOAT_LAYERS = (
    'projection',  # the first layer reads pixels; a hundredth of the multiply-adds
    'rpn_cls',
    'rpn_reg',  # sorted and decoded: a quantum of a delta moves a large anchor by pixels
    'fc_cls',
    'fc_reg',
    'conv_logits',  # the answers themselves
)


def quantize_onnx(
    source: str | Path, target: str | Path, images: Iterable[np.ndarray], float_layers: Iterable[str] = FLOAT_LAYERS
) -> list[str]:
    """Writes a file whose convolutions and linear layers run in int8, QDQ form, one scale per output channel.

    Only layers with weights are quantized: softmax, the products inside attention, the quotient of linear attention,
    position tables, GELU, residual sums, RoIAlign and all that computes boxes stay in float32.

    Args:
        source: A file that :func:`slab_det.deployment.export.export_onnx` wrote.
        target: The new file.
        images: Calibration images, (1, 3, H, W), float32, 0 to 255: training images as inference sees them.
        float_layers: Layers whose node names contain one of these stay in float32.

    Returns:
        The names of the nodes that were quantized.
    """
    onnx, quantization = need('onnx'), need('onnxruntime.quantization')
    with tempfile.TemporaryDirectory() as folder:
        prepared = Path(folder) / 'prepared.onnx'
        _fold_constants(source, prepared)
        model = onnx.load(prepared)
        nodes = list(_quantizable(model, tuple(float_layers)))
        quantization.quantize_static(
            prepared,
            target,
            _Reader(images),
            quant_format=quantization.QuantFormat.QDQ,
            per_channel=True,
            activation_type=quantization.QuantType.QUInt8,
            weight_type=quantization.QuantType.QInt8,
            nodes_to_quantize=nodes,
        )
    quantized = onnx.load(target)
    onnx.helper.set_model_props(quantized, {entry.key: entry.value for entry in onnx.load(source).metadata_props})
    onnx.save(quantized, target)
    return nodes


class _Reader:
    """onnxruntime.quantization's CalibrationDataReader."""

    def __init__(self, images: Iterable[np.ndarray]) -> None:
        self._images = iter(images)

    def get_next(self) -> dict[str, np.ndarray] | None:
        image = next(self._images, None)
        return None if image is None else {'image': image}


def _fold_constants(source: str | Path, target: Path) -> None:
    """Weights that the graph still computes, as linear attention's repeated kernels, become constants."""
    onnxruntime = need('onnxruntime')
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(target)
    onnxruntime.InferenceSession(str(source), options, providers=['CPUExecutionProvider'])


def _quantizable(model: ModelProto, float_layers: tuple[str, ...]) -> Iterator[str]:
    weights = {tensor.name for tensor in model.graph.initializer}
    kept = re.compile('|'.join(map(re.escape, float_layers))) if float_layers else None
    for node in model.graph.node:
        has_weight = node.op_type in ('Conv', 'ConvTranspose', 'Gemm', 'MatMul') and any(
            name in weights for name in node.input[:2]
        )
        if has_weight and not (kept and kept.search(node.name)):
            yield node.name
