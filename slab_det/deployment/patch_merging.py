"""Patch merging of a deployed Swin: its weight laid out once."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from slab_det.backbones.patch_merging import PatchMerging
from slab_det.deployment.linear import linear


class DeployedPatchMerging(nn.Module):
    """A patch merging without a norm; see :class:`~slab_det.backbones.patch_merging.PatchMerging` for shapes."""

    def __init__(self, merging: PatchMerging) -> None:
        super().__init__()
        self.stride = merging.stride
        self.register_buffer('weight', merging.token_weight().detach().contiguous())
        self.register_buffer('bias', merging.reduction.bias)

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        stride = self.stride
        x = x.unflatten(1, hw_shape)
        padding = (0, 0, 0, -hw_shape[1] % stride, 0, -hw_shape[0] % stride)
        if any(padding):
            x = F.pad(x, padding)
        x = x.unflatten(2, (-1, stride)).unflatten(1, (-1, stride))
        # (B, H', s, W', s, C) -> (B, H' * W', s * s * C), column by column.
        merged = x.permute(0, 1, 3, 4, 2, 5).flatten(3).flatten(1, 2)
        return linear(merged, self.weight, self.bias), (x.shape[1], x.shape[3])
