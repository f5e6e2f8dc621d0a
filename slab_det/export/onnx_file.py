"""Writes a detector as an ONNX file."""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import slab_det
from slab_det.common.errors import ExportError
from slab_det.common.files import whole_file
from slab_det.common.modules import copy_module, input_channels, is_deployed
from slab_det.common.pipeline import find_test_pipeline
from slab_det.common.record import describe_code, to_plain
from slab_det.common.tensors import check_finite
from slab_det.export.backbones import make_size_free
from slab_det.export.detector import BackboneGraph, DetectorGraph
from slab_det.export.extras import import_extra
from slab_det.export.loaded_file import METADATA_KEY, crop_to_multiples
from slab_det.export.settings import describe_preprocessor, find_resize
from slab_det.families.half_precision import keep_boxes_float32, lower_precision
from slab_det.norms import named_offline_norms
from slab_det.norms.folds import describe_hooks
from slab_det.precisions import written_precisions

EXPORT_SCOPES = {'backbone': BackboneGraph, 'detector': DetectorGraph}
# RoiAlign has half-pixel coordinates from opset 16 on; PyTorch 2.6 writes none after 20. ONNX Runtime has no kernel for
# RoiAlign of opset 22.
OPSETS = range(16, 21)
OPSET = 17
# From this opset on, LayerNorm is one operator, which computes variances in float32 whatever the dtype of its input.
NORM_OPSET = 17
# Small, because tracing runs the model; sides are not multiples of a window or a stride.
TRACED_SIZE = (161, 227)
# Necks that double a map and join it with the next take images of such multiples only.
DIVISORS = (1, 32)


def build_graph(detector: nn.Module, scope: str = 'detector') -> nn.Module:
    """Builds the module that :func:`export_onnx` traces, in its own dtype, from a copy of the detector."""
    if scope not in EXPORT_SCOPES:
        raise ExportError(f'scope {scope!r} is not one of {", ".join(EXPORT_SCOPES)}')
    check_finite(detector, ExportError)
    hooked = [name for name, module in detector.named_modules() if describe_hooks(module)]
    if hooked:
        raise ExportError(f'{hooked[0]} has hooks, which the file would lose; remove them')
    detector = slab_det.fuse(detector) if any(named_offline_norms(detector)) else copy_module(detector)
    # The graph makes its indices on the CPU.
    detector.cpu().eval()
    make_size_free(detector)
    return EXPORT_SCOPES[scope](detector).eval()


@torch.no_grad()
def export_onnx(
    detector: nn.Module,
    path: str | Path,
    scope: str = 'detector',
    opset: int = OPSET,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes a detector as ONNX, for images of any height and width that the detector takes, batch 1.

    Args:
        detector: A detector in eval mode; export fuses its offline norms in a copy.
        path: The file, ending in .onnx.
        scope: 'backbone' or 'detector'.
        opset: Version of the operators, 16 to 20, for programs that read no other.
        dtype: ``torch.float32``, or ``torch.float16`` for GPUs: weights and arithmetic of backbone, neck and heads are
            in float16, as in :func:`slab_det.deploy`; inputs, outputs, boxes, NMS and RoIAlign stay in float32.

    Raises:
        ExportError: If the detector, or a part of it, has no export form, or has weights that are not finite; if the
            file cannot have this opset or this dtype.
        FusionError: If the detector cannot be fused.
        OSError: If the file cannot be written. A file that was there before is then unchanged.
    """
    if is_deployed(detector):
        raise ExportError('the model is deployed; export the fused model that it was made of')
    if opset not in OPSETS:
        raise ExportError(f'opset={opset}: give {OPSETS[0]} to {OPSETS[-1]}; others lack RoIAlign as mmdet computes it')
    precision = str(dtype).removeprefix('torch.')
    if precision not in written_precisions():
        raise ExportError(f'dtype={dtype}: give one of {", ".join(written_precisions())}')
    if dtype != torch.float32 and opset < NORM_OPSET:
        raise ExportError(
            f'opset={opset} has no LayerNormalization, whose squares overflow in {precision}: give {NORM_OPSET} or more'
        )
    onnx = import_extra('onnx')
    # Before minutes of tracing.
    dataset_meta = _to_json(getattr(detector, 'dataset_meta', None))
    graph = build_graph(detector, scope).float()
    if dtype != torch.float32:
        lower_precision(graph.detector, dtype)
        keep_boxes_float32(graph.detector)
    image, divisor = _traced_image(graph, input_channels(detector))
    try:
        model = onnx.load_from_string(_trace(graph, image, opset))
    except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
        # The rest of the message asks the user to report a bug to PyTorch.
        reason = str(error).strip().partition('\n')[0].partition('. ')[0].rstrip('.')
        raise ExportError(f'a part of this {type(detector).__name__} has no export form: {reason}') from error
    if scope == 'detector':
        # Behind a reshape the tracer loses the number of coordinates.
        model.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 4
    metadata = dict(
        version=slab_det.__version__,
        **describe_code(),
        scope=scope,
        precision=precision,
        dataset_meta=dataset_meta,
        **_describe_input(detector, divisor),
        **graph.metadata(),
    )
    onnx.helper.set_model_props(model, {METADATA_KEY: json.dumps(metadata)})
    onnx.checker.check_model(model)
    with whole_file(path) as name:
        name.write_bytes(model.SerializeToString())


def _trace(graph: nn.Module, image: Tensor, opset: int) -> bytes:
    """The content of a file that computes what the graph does, for images of any size."""
    buffer = io.BytesIO()
    with _tracer_workarounds(opset):
        # The tracer takes seconds for a Swin-T; torch.export takes minutes, because every operator simplifies its
        # symbolic sizes again. check_parity finds sizes that the tracer stored as constants.
        torch.onnx.export(
            graph,
            (image,),
            buffer,
            dynamo=False,
            opset_version=opset,
            input_names=['image'],
            output_names=graph.output_names(),
            dynamic_axes={'image': {2: 'height', 3: 'width'}, **graph.dynamic_axes()},
        )
    return buffer.getvalue()


def _to_json(meta: dict | None) -> dict | None:
    """The class names and other facts about a data set as values that JSON can hold; arrays become lists.

    Raises:
        ExportError: If a value is neither text nor numbers.
    """

    def convert(value: object) -> object:
        if isinstance(value, set | frozenset):
            return sorted(value)
        if isinstance(value, np.ndarray | np.generic | Tensor):
            return value.tolist()
        raise TypeError(f'a {type(value).__name__} is neither text nor numbers')

    try:
        return to_plain(meta, convert)
    except (TypeError, ValueError) as error:
        raise ExportError(f'dataset_meta cannot be stored in the file: {error}; remove the entry') from error


def _traced_image(graph: nn.Module, channels: int) -> tuple[Tensor, int]:
    """A small noise image that the graph takes, and the number of which its sides must be multiples."""
    image = torch.rand((1, channels, *TRACED_SIZE), dtype=torch.float32) * 255
    for divisor in DIVISORS:
        found = crop_to_multiples(image, divisor)
        with suppress(RuntimeError):
            graph(found)
            return found, divisor
    # Tracing raises the error.
    return image, 1


def _describe_input(detector: nn.Module, divisor: int) -> dict:
    """The metadata about the input image, and about the preprocessing inside the graph."""
    resize = None
    # build_detector stores the config here, as mmdet's init_detector does.
    cfg = getattr(detector, 'cfg', {})
    if cfg.get('test_dataloader') or cfg.get('val_dataloader'):
        resize = find_resize(find_test_pipeline(cfg))
    order = 'gray' if input_channels(detector) == 1 else 'BGR'
    image = dict(channel_order=order, range=[0, 255], resize=resize, size_divisor=divisor)
    return dict(image=image, **describe_preprocessor(detector.data_preprocessor))


class _DynamicSizes(TorchFunctionMode):
    """Keeps sizes in ``Tensor.unflatten`` dynamic in a trace; a mode reaches the calls of its own thread alone."""

    def __torch_function__(
        self, func: Callable, types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if func is not Tensor.unflatten:
            return func(*args, **kwargs or {})

        def unflatten(x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
            dim %= x.ndim
            # Sizes that are read from the shape stay dynamic in a trace.
            return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])

        return unflatten(*args, **kwargs or {})


# PyTorch's exporter keeps its state, and the operators below, in variables of its module.
_EXPORTER = Lock()


@contextmanager
def _tracer_workarounds(opset: int) -> Iterator[None]:
    """Keeps sizes dynamic, leaves out dropout, and mutes warnings of the tracer; one export at a time."""
    with _EXPORTER, warnings.catch_warnings(), _DynamicSizes():
        warnings.filterwarnings('ignore', category=torch.jit.TracerWarning)
        warnings.filterwarnings('ignore', category=DeprecationWarning)
        warnings.filterwarnings('ignore', category=UserWarning, module='torch.onnx')
        # torch writes scaled_dot_product_attention with a dropout of probability 0, which OpenVINO refuses.
        torch.onnx.register_custom_op_symbolic('aten::dropout', lambda graph, x, p, train: x, opset)
        try:
            yield
        finally:
            torch.onnx.unregister_custom_op_symbolic('aten::dropout', opset)
