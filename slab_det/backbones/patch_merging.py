"""Patch merging: each 2x2 block of tokens becomes one token of twice the width (Swin)."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from mmengine.model import BaseModule
from torch import Tensor, nn

from slab_det.fusion import Fold


class PatchMerging(BaseModule):
    """Norm and linear reduction over 2x2 blocks; state-dict keys and channel order are those of mmdet's class.

    Args:
        in_channels: Channels C of a token.
        out_channels: Channels of a merged token.
        stride: Side s of a block.
        norm_cfg: Norm over the s * s * C channels of a block; None for none.

    Shape:
        (B, H * W, C) -> (B, ceil(H / s) * ceil(W / s), C_out). Odd sides are padded with zeros before the norm.
    """

    def __init__(self, in_channels: int, out_channels: int, stride: int = 2, norm_cfg: dict | None = None) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.stride = stride
        block_channels = stride * stride * in_channels
        self.norm = build_norm_layer(norm_cfg, block_channels)[1] if norm_cfg else None
        self.reduction = nn.Linear(block_channels, out_channels, bias=False)

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        """Merges a map and returns it with its new (H, W)."""
        stride, (height, width) = self.stride, hw_shape
        x = x.unflatten(1, hw_shape)
        x = F.pad(x, (0, 0, 0, -width % stride, 0, -height % stride))
        # (B, H', s, W', s, C) -> (B, H', W', s, s, C)
        x = x.unflatten(2, (-1, stride)).unflatten(1, (-1, stride)).transpose(2, 3)
        out_shape = (x.shape[1], x.shape[2])
        if self.norm is not None and not isinstance(self.norm, nn.Identity):
            # The norm's channels are in mmdet's order, (C, s, s).
            x = self.norm(x.flatten(3, 4).transpose(3, 4).flatten(3).flatten(1, 2))
            x = x.unflatten(2, (self.in_channels, stride, stride)).permute(0, 1, 4, 3, 2)
        else:
            x = x.flatten(1, 2).transpose(2, 3)
        return F.linear(x.flatten(2), self.token_weight(), self.reduction.bias), out_shape

    def folds(self) -> Iterator[Fold]:
        """Where the norm goes at inference: it follows the padding of odd maps, which passes it like any token."""
        yield Fold('norm', before='reduction')

    def token_weight(self) -> Tensor:
        """The reduction's weight for blocks that lie token by token, column by column: (C_out, s * s * C)."""
        # The order in which the released code sums.
        weight = self.reduction.weight.unflatten(1, (self.in_channels, self.stride, self.stride))
        return weight.permute(0, 3, 2, 1).flatten(1)
