"""Patch merging: each 2x2 block of tokens becomes one token of twice the width (Swin)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from mmcv.cnn import build_norm_layer
from mmengine.model import BaseModule
from torch import Tensor, nn

from slab_det.fusion import Fold


class PatchMerging(BaseModule):
    """Norm and linear reduction over s x s blocks of tokens.

    A block is gathered in memory order (row, column, C), and norm and reduction hold their weights in that order. A
    state dict holds them in the order of mmdet's class, (C, row, column): loading and ``state_dict()`` permute the
    weights, so that no activation is ever transposed. The tensors of ``state_dict()`` are therefore copies; those of
    ``state_dict(keep_vars=True)`` are the ones in use, in the order of a block.

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
        self.register_load_state_dict_pre_hook(_load_block_order)
        self.register_state_dict_post_hook(_save_unfold_order)

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> tuple[Tensor, tuple[int, int]]:
        """Merges a map and returns it with its new (H, W)."""
        stride, (height, width) = self.stride, hw_shape
        x = x.unflatten(1, hw_shape)
        padding = (0, 0, 0, -width % stride, 0, -height % stride)
        # Whether a traced size divides is not known.
        if torch.jit.is_tracing() or any(padding):
            x = F.pad(x, padding)
        # (B, H', s, W', s, C) -> (B, H' * W', s * s * C)
        x = x.unflatten(2, (-1, stride)).unflatten(1, (-1, stride)).transpose(2, 3)
        hw_shape = (x.shape[1], x.shape[2])
        x = x.flatten(3).flatten(1, 2)
        return self.reduction(x if self.norm is None else self.norm(x)), hw_shape

    def folds(self) -> Iterator[Fold]:
        """Where the norm goes at inference: it follows the padding of odd maps, which passes it like any token."""
        yield Fold('norm', before='reduction')

    def to_block_order(self, weight: Tensor) -> Tensor:
        """Permutes the last dimension from mmdet's order (C, row, column) to that of a block, (row, column, C)."""
        return weight.unflatten(-1, (self.in_channels, self.stride, self.stride)).movedim(-3, -1).flatten(-3)

    def to_unfold_order(self, weight: Tensor) -> Tensor:
        """Permutes the last dimension from the order of a block back to mmdet's."""
        return weight.unflatten(-1, (self.stride, self.stride, self.in_channels)).movedim(-1, -3).flatten(-3)


def _load_block_order(merging: PatchMerging, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    for key in _block_keys(merging, state_dict, prefix):
        state_dict[key] = merging.to_block_order(state_dict[key])


def _save_unfold_order(merging: PatchMerging, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    in_use = {id(tensor) for tensor in (*merging.parameters(), *merging.buffers())}
    for key in _block_keys(merging, state_dict, prefix):
        if id(state_dict[key]) not in in_use:
            state_dict[key] = merging.to_unfold_order(state_dict[key])


def _block_keys(merging: PatchMerging, state_dict: dict[str, Tensor], prefix: str) -> list[str]:
    """What has one entry per channel of a block: the reduction's weight and such tensors of any norm."""
    block_channels = merging.stride**2 * merging.in_channels
    return [
        key
        for key, value in state_dict.items()
        if (key == f'{prefix}reduction.weight' or key.startswith(f'{prefix}norm.'))
        # What has another shape is refused by the layer that it is for.
        and value.ndim
        and value.shape[-1] == block_channels
    ]
