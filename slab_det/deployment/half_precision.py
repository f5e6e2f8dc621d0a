"""Evaluation in half precision that keeps boxes exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slab_det.deployment.heads import HEADS, CastOutputs


def autocast_forward(model: nn.Module, dtype: torch.dtype) -> None:
    """Has every forward of a detector autocast to ``dtype``, up to what its heads return, which is float32 again.

    mmdet makes anchors, and so boxes, in the dtype of the scores: in bfloat16 a coordinate of 1000 is a multiple of 4.
    """
    model.forward = _Autocast(model.forward, next(model.parameters()).device.type, dtype)
    for module in model.modules():
        if isinstance(module, HEADS):
            module.register_forward_hook(CastOutputs(torch.float32))


@dataclass
class _Autocast:
    """``forward`` under autocast. No closure: in the copy of a model it calls the copy's."""

    forward: Callable
    device_type: str
    dtype: torch.dtype

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(self.device_type, self.dtype):
            return self.forward(*args, **kwargs)
