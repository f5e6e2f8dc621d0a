"""Heads of a deployed detector: low precision where the products are, float32 where coordinates are."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
from mmdet.models.roi_heads.bbox_heads import BBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from mmdet.models.roi_heads.roi_extractors.base_roi_extractor import BaseRoIExtractor
from torch import Tensor, nn

from slab_det.runtime.errors import DeploymentError
from slab_det.runtime.ops import at_least_float32

LOW_PRECISION = (torch.bfloat16, torch.float16)
# They read features and return scores, deltas or logits: coordinates are made of these later, outside of them.
HEADS = (BaseDenseHead, BBoxHead, FCNMaskHead)


class CastInputs:
    """A forward pre-hook that casts all inputs."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return _map(args, self._cast), _map(kwargs, self._cast)

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


class CastOutputs(CastInputs):
    """A forward hook that casts the outputs."""

    def __call__(self, module: nn.Module, args: tuple, outputs: Any) -> Any:
        return _map(outputs, self._cast)


class RoIFeatures:
    """Forward pre-hooks of RoI extractors that lay the maps out as RoIAlign reads them, once for boxes and masks.

    RoIAlign takes float32 or more, one channel after the other, and would copy for each of them.
    """

    def __init__(self) -> None:
        self._shared: tuple[tuple[Tensor, ...], list[Tensor]] | None = None

    def forget(self, *_: Any) -> None:
        """There is another image: maps may be written anew in place."""
        self._shared = None

    def lay_out(self, extractor: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Everything laid out."""
        return _map(args, _laid_out), _map(kwargs, _laid_out)

    def lay_out_and_share(self, extractor: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The same, kept for the masks of this image."""
        laid_out = self.lay_out(extractor, args, kwargs)
        self._shared = (tuple(args[0]), laid_out[0][0]) if args else None
        return laid_out

    def take_shared(self, extractor: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """What :meth:`lay_out_and_share` left, if it had the same maps; used up, so that it can be freed."""
        shared, self._shared = self._shared, None
        same = (
            shared is not None
            and args
            and len(shared[0]) == len(args[0])
            and not any(map(operator.is_not, shared[0], args[0]))
        )
        if not same:
            return self.lay_out(extractor, args, kwargs)
        return (shared[1], *_map(args[1:], _laid_out)), _map(kwargs, _laid_out)


def _laid_out(x: Tensor) -> Tensor:
    return x.to(at_least_float32(x.dtype), memory_format=torch.contiguous_format)


def _map(values: Any, function: Any) -> Any:
    """Applies a function to the floating-point tensors in nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        return function(values) if values.is_floating_point() else values
    if isinstance(values, tuple | list):
        return type(values)(_map(value, function) for value in values)
    if type(values) is dict:
        return {key: _map(value, function) for key, value in values.items()}
    return values


def lay_out_roi_features(model: nn.Module) -> RoIFeatures:
    """Lets the RoI extractors of a detector read maps as they need them, in place."""
    features = RoIFeatures()
    roi_head = getattr(model, 'roi_head', None)
    boxes, masks = (getattr(roi_head, f'{name}_roi_extractor', None) for name in ('bbox', 'mask'))
    hooks = {}
    if isinstance(boxes, BaseRoIExtractor) and isinstance(masks, BaseRoIExtractor) and boxes is not masks:
        hooks = {boxes: features.lay_out_and_share, masks: features.take_shared}
        model.backbone.register_forward_pre_hook(features.forget)
    for module in model.modules():
        if isinstance(module, BaseRoIExtractor):
            module.register_forward_pre_hook(hooks.get(module, features.lay_out), with_kwargs=True)
    return features


def check_precision(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Raises unless :func:`lower_precision` can cast the model.

    Raises:
        DeploymentError: If ``dtype`` is no low precision, or a part of the detector is of unknown kind.
    """
    if dtype is None:
        return
    if dtype not in LOW_PRECISION:
        raise DeploymentError(f'cannot deploy in {dtype}: choose from {", ".join(map(str, LOW_PRECISION))}, or None')
    known = {parameter for module in (*_networks(model), *_heads(model)) for parameter in module.parameters()}
    for name, parameter in model.named_parameters():
        if parameter not in known:
            raise DeploymentError(
                f'{name.rpartition(".")[0]} of {type(model).__name__}: which of its tensors are '
                'coordinates is not known; deploy this detector in float32'
            )


def lower_precision(model: nn.Module, dtype: torch.dtype) -> None:
    """Lets the layers of a detector compute in ``dtype``, in place; anchors, boxes, scores and RoIAlign stay float32.

    A coordinate has 8 significant bits in bfloat16 and 11 in float16: on an image of 1333 pixels that is an error of
    several pixels, or of one. RoI extractors are taken care of by :func:`lay_out_roi_features`.

    Args:
        model: What :func:`check_precision` lets pass.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
    """
    for network in _networks(model):
        network.to(dtype)
        network.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True)
    for head in _heads(model):
        head.to(dtype)
        head.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True)
        head.register_forward_hook(CastOutputs(torch.float32))


def _networks(model: nn.Module) -> list[nn.Module]:
    """What maps images to features."""
    if not hasattr(model, 'backbone'):
        return [model]
    return [part for part in (model.backbone, getattr(model, 'neck', None)) if part is not None]


def _heads(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, HEADS))
