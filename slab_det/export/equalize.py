"""Scales the channels that a layer reads, where rounding them to int8 together would drown some of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from slab_det.export.extras import import_extra, limit_threads
from slab_det.export.in_onnxruntime import in_file_order

# A scale of a channel is (range of the channel)^POWER / (its largest weight)^(1 - POWER).
POWERS = (0.25, 0.5, 0.75, 1.0)
# Least rounding noise, as a share of the variance of a layer's output, that is worth a multiplication of the layer's
# input, and least factor by which the multiplication must reduce it.
LEAST_NOISE, LEAST_GAIN = 1e-3, 2.0
# What is measured of each layer.
PARTS = ('low', 'high', 'square', 'mean', 'output_square')
# Largest rounding noise of a layer that runs in int8, as a share of the variance of its output.
MOST_NOISE = 0.01
# Images that the ranges are measured on.
RANGE_IMAGES = 10


class _Layer(NamedTuple):
    """A layer whose second input is a weight.

    Attributes:
        node: The node of the graph.
        weight: Its weight with the input channels first, (C, N).
        axis: The axis of the input channels in the stored weight.
        rank: The number of axes of the input, whose channels are then on axis 1; 0 if the channels are the last axis.
    """

    node: Any
    weight: np.ndarray
    axis: int
    rank: int = 0


def equalize(model: Any, names: Sequence[str], images: Iterable[np.ndarray]) -> tuple[list[str], list[str]]:
    """Multiplies the input of layers by 1 / s per channel, and their weights by s, in place, and finds lost layers.

    int8 rounds all channels of an input by one step. Layers that absorbed a norm read channels of very different
    ranges, and have large weights where the range is small, which amplify the step. As in SmoothQuant (Xiao et al.,
    ICML 2023), ``W x = (W diag(s)) (x / s)``. Of several s the one with the least rounding noise is taken: with a step
    d = range(x / s) / 255 and weights of 8 bits,

        noise = d^2 / 12 |W diag(s)|^2 + sum over outputs (max |W_o diag(s)| / 127)^2 / 12 E |x / s|^2.

    A layer is left alone where the noise is a small share of its output's variance, or s does not halve it. A layer is
    lost where the noise is more than ``MOST_NOISE`` of this variance with the best s, too: the weights of some FFNs
    that absorbed a norm cancel each other.

    Args:
        model: The ``onnx.ModelProto`` with float weights.
        names: Names of the nodes that will be quantized.
        images: Calibration images, (1, 3, H, W).

    Returns:
        The names of the nodes whose inputs are scaled, and of the lost nodes, which should stay in float32.
    """
    onnx = import_extra('onnx')
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    layers = [
        layer
        for node in model.graph.node
        if node.name in names and (layer := _read_layer(onnx, node, weights)) is not None
    ]
    found = _measure(onnx, model, layers, images)
    scaled, lost = [], []
    for layer in layers:
        scale, share = _choose_scale(layer.weight, *found[layer.node.name])
        if share > MOST_NOISE:
            lost.append(layer.node.name)
        elif scale is not None:
            _scale_input(onnx, model.graph, layer, weights[layer.node.input[1]], scale)
            scaled.append(layer.node.name)
    # The weights before they were scaled.
    read = {name for node in model.graph.node for name in node.input} | {out.name for out in model.graph.output}
    for tensor in [tensor for tensor in model.graph.initializer if tensor.name not in read]:
        model.graph.initializer.remove(tensor)
    return scaled, lost


def _read_layer(onnx: Any, node: Any, weights: Mapping[str, Any]) -> _Layer | None:
    """Returns None for layers of other kinds, such as grouped convolutions."""
    if node.op_type not in ('Conv', 'Gemm', 'MatMul') or node.input[1] not in weights:
        return None
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    weight = onnx.numpy_helper.to_array(weights[node.input[1]])
    if node.op_type == 'Conv':
        rows = np.moveaxis(weight, 1, 0).reshape(weight.shape[1], -1)
        return _Layer(node, rows, 1, weight.ndim) if attributes.get('group', 1) == 1 else None
    if weight.ndim != 2 or attributes.get('transA'):
        return None
    axis = 1 if attributes.get('transB') else 0
    return _Layer(node, np.moveaxis(weight, axis, 0), axis)


def _measure(
    onnx: Any, model: Any, layers: Sequence[_Layer], images: Iterable[np.ndarray]
) -> dict[str, tuple[np.ndarray, ...]]:
    """The least and largest value and the mean square of each input channel, and the variance of the output."""
    probed = onnx.ModelProto()
    probed.CopyFrom(model)
    make = onnx.helper.make_node
    axes_are_inputs = any(entry.domain == '' and entry.version >= 18 for entry in model.opset_import)

    def reduce(kind: str, source: str, output: str, axes: Sequence[int]) -> Any:
        if not axes_are_inputs:
            return make(kind, [source], [output], axes=axes, keepdims=0)
        probed.graph.initializer.append(onnx.numpy_helper.from_array(np.array(axes, np.int64), f'{output}/axes'))
        return make(kind, [source, f'{output}/axes'], [output], keepdims=0)

    # The graph reduces each value itself, behind its layer: whole values of all layers would take gigabytes.
    probes: dict[str, list[Any]] = {}
    for layer in layers:
        behind = probes[layer.node.name] = []
        source, output, name = layer.node.input[0], layer.node.output[0], f'{layer.node.name}/probe'
        axes = [axis for axis in range(layer.rank) if axis != 1] or [0]
        if not layer.rank:
            # Inputs of MatMul have any rank: all axes but the last are joined.
            shape = f'{name}/shape'
            channels = np.array([-1, len(layer.weight)], np.int64)
            probed.graph.initializer.append(onnx.numpy_helper.from_array(channels, shape))
            behind.append(make('Reshape', [source, shape], [f'{name}/tokens']))
            source = f'{name}/tokens'
        behind.extend(
            [
                reduce('ReduceMin', source, f'{name}/low', axes),
                reduce('ReduceMax', source, f'{name}/high', axes),
                make('Mul', [source, source], [f'{name}/squares']),
                reduce('ReduceMean', f'{name}/squares', f'{name}/square', axes),
                make('ReduceMean', [output], [f'{name}/mean'], keepdims=0),
                make('Mul', [output, output], [f'{name}/output_squares']),
                make('ReduceMean', [f'{name}/output_squares'], [f'{name}/output_square'], keepdims=0),
            ]
        )
        for part in PARTS:
            probed.graph.output.append(onnx.helper.make_empty_tensor_value_info(f'{name}/{part}'))
    nodes = [each for node in model.graph.node for each in (node, *probes.get(node.name, ()))]
    del probed.graph.node[:]
    probed.graph.node.extend(nodes)
    onnxruntime = import_extra('onnxruntime')
    with in_file_order():
        options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = limit_threads(0)
    session = onnxruntime.InferenceSession(probed.SerializeToString(), options, providers=['CPUExecutionProvider'])
    names = [f'{layer.node.name}/probe/{part}' for layer in layers for part in PARTS]
    values: dict[str, list[np.ndarray]] = defaultdict(list)
    for image in images:
        for name, value in zip(names, session.run(names, {'image': image}), strict=True):
            values[name].append(value)
    found = {}
    for layer in layers:
        low, high, square, mean, output = (np.stack(values[f'{layer.node.name}/probe/{part}']) for part in PARTS)
        variance = output.mean() - mean.mean() ** 2
        found[layer.node.name] = low.min(0).clip(max=0), high.max(0).clip(min=0), square.mean(0), variance
    return found


def _choose_scale(
    weight: np.ndarray, low: np.ndarray, high: np.ndarray, square: np.ndarray, variance: float
) -> tuple[np.ndarray | None, float]:
    """The s with the least noise, (C,), or None if the layer is better left alone; and the share of the noise then."""

    def noise(scale: np.ndarray) -> float:
        scaled = weight * scale[:, None]
        step = ((high / scale).max() - (low / scale).min()) / 255
        rounding = (np.abs(scaled).max(0) / 127) ** 2 / 12
        return step**2 / 12 * (scaled**2).sum() + rounding.sum() * (square / scale**2).sum()

    ranges, largest = np.maximum(high, -low), np.abs(weight).max(1)
    # A channel that is always 0, or that nothing reads, does not matter.
    used = (ranges > 0) & (largest > 0)
    if not used.any():
        return None, 0.0
    plain = noise(np.ones_like(ranges))
    best, least = None, plain / LEAST_GAIN
    for power in POWERS:
        logs = power * np.log(ranges, where=used, out=np.zeros_like(ranges))
        logs -= (1 - power) * np.log(largest, where=used, out=np.zeros_like(ranges))
        scale = np.exp(logs - logs[used].mean()).astype(np.float32)
        scale[~used] = 1.0
        if noise(scale) < least:
            best, least = scale, noise(scale)
    variance = max(variance * weight.shape[1], math.ulp(0.0))
    if best is None or plain / variance <= LEAST_NOISE:
        return None, plain / variance
    return best, least / variance


def _scale_input(onnx: Any, graph: Any, layer: _Layer, weight: Any, scale: np.ndarray) -> None:
    node, array = layer.node, onnx.numpy_helper.to_array(weight)
    shape, by_channel = [1] * layer.rank or [1], [1] * array.ndim
    shape[1 if layer.rank else 0] = by_channel[layer.axis] = -1
    names = [f'{node.name}/{part}' for part in ('inverse_scale', 'scaled_input', 'scaled_weight')]
    graph.initializer.extend(
        [
            onnx.numpy_helper.from_array((1 / scale).astype(np.float32).reshape(shape), names[0]),
            onnx.numpy_helper.from_array((array * scale.reshape(by_channel)).astype(np.float32), names[2]),
        ]
    )
    multiply = onnx.helper.make_node('Mul', [node.input[0], names[0]], [names[1]], f'{node.name}/equalize')
    index = next(index for index, other in enumerate(graph.node) if other.name == node.name)
    graph.node[index].input[:2] = names[1:]
    graph.node.insert(index, multiply)
