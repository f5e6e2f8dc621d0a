"""Half precision for the layers of a detector; anchors, boxes, scores and RoIAlign stay in float32.

Deployed detectors and ONNX files have the same layers in half precision.

On an image of 1333 pixels, a coordinate in bfloat16 (8 significant bits) is wrong by several pixels, and in float16
(11 bits) by one. mmdet computes anchors, and so boxes, in the dtype of the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from mmdet.models.dense_heads import MaskFormerHead
from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
from mmdet.models.layers import DeformableDetrTransformerEncoder, PixelDecoder
from mmdet.models.roi_heads.bbox_heads import BBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.models.roi_heads.roi_extractors.base_roi_extractor import BaseRoIExtractor
from mmengine.logging import MMLogger
from mmengine.utils import apply_to
from torch import Tensor, nn

from slab_det.common.errors import DeploymentError
from slab_det.common.tensors import HALF_PRECISIONS
from slab_det.compare.difference import RoundedArithmetic, round_weights
from slab_det.families.deformable import SizedPixelDecoder, has_own_sampling
from slab_det.norms.base import at_least_float32

# The forward of a head returns scores, deltas or logits; mmdet computes coordinates from them afterwards.
HEADS = (BaseDenseHead, BBoxHead, FCNMaskHead)
# The queries of these heads attend to maps with encodings of positions, which mmdet adds in float32.
QUERY_HEADS = (MaskFormerHead,)
# What stands between the neck and the queries, and computes no coordinates in the dtype of its layers.
ENCODERS = (DeformableDetrTransformerEncoder, PixelDecoder, SizedPixelDecoder)


def autocast_forward(model: nn.Module, dtype: torch.dtype) -> None:
    """Runs every forward of a detector under autocast to ``dtype``, with boxes in float32."""
    model.forward = torch.autocast(next(model.parameters()).device.type, dtype)(model.forward)
    keep_boxes_float32(model)


def lower_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts backbone, neck and heads to ``dtype``, in place; :func:`keep_boxes_float32` must follow.

    Of a detector with parameters elsewhere, as DETRs have, only backbone, neck and encoder of maps are cast, because
    coordinates may be computed elsewhere.

    Args:
        model: A detector or a backbone.
        dtype: ``torch.bfloat16`` or ``torch.float16``.

    Raises:
        DeploymentError: If ``dtype`` is not a half precision.
    """
    for part in _prepare_parts(model, dtype):
        part.to(dtype).register_forward_pre_hook(partial(_cast_inputs, dtype), with_kwargs=True)


def round_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Makes a model in float32 compute what :func:`lower_precision` should give, whatever the kernels of ``dtype`` do.

    Weights, inputs and the result of every operator of the same parts are rounded to ``dtype``, in place.
    """
    for part in _prepare_parts(model, dtype):
        round_weights(part, dtype)
        part.forward = partial(_forward_rounded, part.forward, dtype)


def _forward_rounded(forward: Callable, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = _cast_arguments(lambda x: x.to(dtype).to(x.dtype), args, kwargs)
    with RoundedArithmetic(dtype):
        return forward(*args, **kwargs)


def _prepare_parts(model: nn.Module, dtype: torch.dtype) -> list[nn.Module]:
    """Returns the parts of a model that will compute in ``dtype``, see :func:`lower_precision`.

    Where that is not every part, neck and encoders return float32 to those that read them, and a message names the
    parts.
    """
    if dtype not in HALF_PRECISIONS:
        raise DeploymentError(f'cannot deploy in {dtype}: choose from {", ".join(map(str, HALF_PRECISIONS))}, or None')
    if not hasattr(model, 'backbone'):
        return [model]
    parts = [model.backbone, *filter(None, [getattr(model, 'neck', None)])]
    heads = [head for head in _modules(model, HEADS) if not isinstance(head, QUERY_HEADS)]
    known = {parameter for part in (*parts, *heads) for parameter in part.parameters()}
    unknown = next((name for name, parameter in model.named_parameters() if parameter not in known), None)
    if unknown is None:
        return parts + heads
    # Exact classes: a subclass may compute coordinates.
    encoders = [part for part in model.modules() if type(part) in ENCODERS and has_own_sampling(part)]
    for part in (parts[-1], *encoders):
        part.register_forward_hook(_raise_outputs)
    parts += encoders
    names = ' and '.join(name for name, part in model.named_modules() if part in parts)
    MMLogger.get_current_instance().info(
        f'{type(model).__name__}: only {names} run in {dtype}, because {unknown} may compute coordinates, which need '
        'float32'
    )
    return parts


def keep_boxes_float32(model: nn.Module) -> None:
    """Makes heads return, and RoI extractors read, at least float32, in half precision and under autocast."""
    for head in _modules(model, HEADS):
        head.register_forward_hook(_raise_outputs)
    for extractor in _modules(model, BaseRoIExtractor):
        extractor.register_forward_pre_hook(_raise_inputs, with_kwargs=True)


def _modules(model: nn.Module, kinds: type | tuple[type, ...]) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kinds)]


def _cast(cast: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Casts the floating-point tensors in nested tuples, lists and dicts."""
    return apply_to(values, lambda x: isinstance(x, Tensor) and x.is_floating_point(), cast)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args: tuple, kwargs: dict) -> Any:
    return _cast_arguments(lambda x: x.to(dtype), args, kwargs)


def _cast_arguments(cast: Callable[[Tensor], Tensor], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    # An encoder computes the positions of samples from these.
    exact = {name: kwargs[name] for name in ('valid_ratios', 'reference_points') if name in kwargs}
    args, kwargs = _cast(cast, (args, kwargs))
    return args, kwargs | exact


def _raise_inputs(module: nn.Module, *inputs: Any) -> Any:
    return _cast(at_least_float32, inputs)


def _raise_outputs(module: nn.Module, args: tuple, outputs: Any) -> Any:
    return _cast(at_least_float32, outputs)
