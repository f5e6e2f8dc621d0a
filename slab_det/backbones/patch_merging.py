"""Patch merging with reordered weights, which reads tokens without transposing them."""

from __future__ import annotations

from mmengine.model import BaseModule
from torch import Tensor, nn

from slab_det.backbones.blocks import PatchMerging
from slab_det.norms import ChannelAffine


class DeployedPatchMerging(PatchMerging):
    """Patch merging with weights in the order (row, column, C) of the tokens, so that no token is transposed.

    Args:
        merging: The patch merging to deploy; its weights are permuted in place.
    """

    def __init__(self, merging: PatchMerging) -> None:
        BaseModule.__init__(self)
        self.in_channels, self.stride = merging.in_channels, merging.stride
        self.norm, self.reduction = merging.norm, merging.reduction
        for parameter in (self.reduction.weight, *(self.norm.parameters() if self.norm else ())):
            blocks = parameter.data.unflatten(-1, (self.in_channels, self.stride, self.stride))
            parameter.data = blocks.movedim(-3, -1).flatten(-3)

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        blocks, hw_shape = self.cut_blocks(x, hw_shape)
        x = blocks.flatten(2)
        return self.reduction(x if self.norm is None else self.norm(x)), hw_shape


def deployed_merging(layer: nn.Module) -> DeployedPatchMerging | None:
    """The deployed form of a patch merging; None for every other layer, and for a merging with a norm of its own."""
    if type(layer) is not PatchMerging:
        return None
    known = type(layer.norm) in (nn.LayerNorm, ChannelAffine, nn.Identity, type(None))
    return DeployedPatchMerging(layer) if known else None
