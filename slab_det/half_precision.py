"""Evaluation in half precision that keeps boxes exact."""
from __future__ import annotations

from typing import Any

import torch
from mmdet.models.dense_heads.base_dense_head import BaseDenseHead
from mmdet.models.roi_heads.bbox_heads import BBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from torch import Tensor, nn

from slab_det.layers.precision import at_least_float32


def autocast_forward(model: nn.Module, dtype: torch.dtype) -> None:
    """Has every forward of a detector autocast to ``dtype``, up to what its heads return, which is float32 again.

    mmdet makes anchors, and so boxes, in the dtype of the scores: in bfloat16 a coordinate of 1000 is a multiple of 4.
    """
    device = next(model.parameters()).device
    model.forward = torch.autocast(device.type, dtype)(model.forward)
    for module in model.modules():
        if isinstance(module, BaseDenseHead | BBoxHead | FCNMaskHead):
            module.register_forward_hook(lambda module, args, outputs: _in_float32(outputs))


def _in_float32(outputs: Any) -> Any:
    """Scores, deltas and logits, in the tuples and lists of levels that heads return them in."""
    if isinstance(outputs, tuple | list):
        return type(outputs)(map(_in_float32, outputs))
    return at_least_float32(outputs) if isinstance(outputs, Tensor) else outputs
