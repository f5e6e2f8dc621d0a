"""Evaluation in half precision that keeps boxes exact."""
from __future__ import annotations

import torch
from torch import nn

from slab_det.deployment.heads import HEADS, CastOutputs


def autocast_forward(model: nn.Module, dtype: torch.dtype) -> None:
    """Has every forward of a detector autocast to ``dtype``, up to what its heads return, which is float32 again.

    mmdet makes anchors, and so boxes, in the dtype of the scores: in bfloat16 a coordinate of 1000 is a multiple of 4.
    """
    device = next(model.parameters()).device
    model.forward = torch.autocast(device.type, dtype)(model.forward)
    for module in model.modules():
        if isinstance(module, HEADS):
            module.register_forward_hook(CastOutputs(torch.float32))
