"""Heads of a deployed detector: low precision where the products are, float32 where coordinates are."""
from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from slab_det.compat.ops import at_least_float32
from slab_det.errors import DeploymentError

LOW_PRECISION = (torch.bfloat16, torch.float16)


class CastInputs:
    """A forward pre-hook that casts the positional inputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, inputs: tuple) -> tuple:
        return cast(inputs, self.dtype)


class CastOutputs:
    """A forward hook that casts the outputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, inputs: tuple, outputs: Any) -> Any:
        return cast(outputs, self.dtype)


class RoIFeatures:
    """Forward pre-hooks of RoI extractors that lay the maps out as RoIAlign reads them, once for boxes and masks.

    RoIAlign takes float32 or more, one channel after the other, and would copy for each of them.
    """

    def __init__(self) -> None:
        self._shared: tuple[tuple[Tensor, ...], list[Tensor]] | None = None

    def for_boxes(self, extractor: nn.Module, inputs: tuple) -> tuple:
        """The maps laid out, and kept for the masks of the same image."""
        maps, *others = inputs
        laid_out = [x.to(at_least_float32(x.dtype), memory_format=torch.contiguous_format) for x in maps]
        self._shared = tuple(maps), laid_out
        return (laid_out, *others)

    def for_masks(self, extractor: nn.Module, inputs: tuple) -> tuple:
        """What :meth:`for_boxes` left, if it had the same maps. It is used up: maps may be written anew in place."""
        maps, *others = inputs
        shared, self._shared = self._shared, None
        if shared is None or len(shared[0]) != len(maps) or any(map(operator.is_not, shared[0], maps)):
            return inputs
        return (shared[1], *others)


def share_roi_features(model: nn.Module) -> None:
    """Lets the RoI extractors of a two-stage detector share their maps, in place."""
    roi_head = getattr(model, 'roi_head', None)
    if getattr(roi_head, 'bbox_roi_extractor', None) is not None:
        features = RoIFeatures()
        roi_head.bbox_roi_extractor.register_forward_pre_hook(features.for_boxes)
        if getattr(roi_head, 'mask_roi_extractor', None) is not None:
            roi_head.mask_roi_extractor.register_forward_pre_hook(features.for_masks)


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Casts the floating-point tensors in nested tuples and lists."""
    if isinstance(values, Tensor):
        return values.to(dtype) if values.is_floating_point() else values
    if isinstance(values, (tuple, list)):
        return type(values)(cast(value, dtype) for value in values)
    return values


def lower_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Lets the layers of a detector compute in ``dtype``, in place; anchors, boxes, scores and RoIAlign stay float32.

    A coordinate has 8 significant bits in bfloat16 and 11 in float16: on an image of 1333 pixels that is an error of
    several pixels, or of one.

    Args:
        model: A one-stage or two-stage detector, or a backbone.
        dtype: ``torch.bfloat16`` or ``torch.float16``.

    Raises:
        DeploymentError: If ``dtype`` is another one, or the detector has parts of unknown kind.
    """
    if dtype not in LOW_PRECISION:
        raise DeploymentError(f'cannot deploy in {dtype}: choose from {", ".join(map(str, LOW_PRECISION))}, or None')
    if not hasattr(model, 'backbone'):
        _cast_networks([model], dtype)
        return
    heads = list(_heads(model))
    _cast_networks([model.backbone, *([model.neck] if getattr(model, 'neck', None) is not None else [])], dtype)
    for head in heads:
        head.to(dtype)
        head.register_forward_pre_hook(CastInputs(dtype))
        head.register_forward_hook(CastOutputs(torch.float32))


def _cast_networks(networks: list[nn.Module], dtype: torch.dtype) -> None:
    for network in networks:
        network.to(dtype)
    networks[0].register_forward_pre_hook(CastInputs(dtype))


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    """What reads features and returns scores or boxes."""
    for name, child in model.named_children():
        if name in ('backbone', 'neck', 'data_preprocessor'):
            continue
        if name == 'roi_head':
            # RoI extractors read boxes.
            yield from (head for part, head in child.named_children() if part in ('bbox_head', 'mask_head'))
        elif name in ('rpn_head', 'bbox_head', 'mask_head'):
            yield child
        elif any(True for _ in child.parameters()):
            raise DeploymentError(f'{name} of {type(model).__name__}: which of its tensors are coordinates is not '
                                  'known; deploy this detector in float32')
