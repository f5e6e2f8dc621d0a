"""A convolution whose kernel is its stride, as one matrix product.

Some CPUs have wrong half-precision kernels for such convolutions (see :mod:`slab_det.compare.kernels`).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from slab_det.norms.folds import CONV


class PatchConv(nn.Module):
    """A k x k convolution of stride k: the pixels of each patch, times a matrix.

    Args:
        conv: The convolution to deploy, without padding, dilation and groups.

    Shape:
        (N, C, H, W) -> (N, C_out, H // k, W // k), channels last.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.in_channels, self.kernel_size, self.bias = conv.in_channels, conv.kernel_size, conv.bias
        # (C_out, C, row, column) -> (C_out, row * column * C): the order in which pixels lie in channels-last memory.
        self.weight = nn.Parameter(conv.weight.permute(0, 2, 3, 1).flatten(1).contiguous(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = self.kernel_size
        # A convolution ignores the rows and columns behind the last whole patch.
        height, width = x.shape[2] // rows, x.shape[3] // columns
        x = x.permute(0, 2, 3, 1)[:, : height * rows, : width * columns]
        patches = x.unflatten(2, (width, columns)).unflatten(1, (height, rows)).transpose(2, 3).flatten(3)
        return F.linear(patches, self.weight, self.bias).permute(0, 3, 1, 2)


def patch_conv(layer: nn.Module) -> PatchConv | None:
    """The :class:`PatchConv` of a layer, or None if the layer computes something else."""
    if type(layer) not in CONV or layer.groups > 1 or layer.kernel_size == (1, 1):
        return None
    is_patches = layer.kernel_size == layer.stride and layer.padding in ((0, 0), 'valid') and layer.dilation == (1, 1)
    return PatchConv(layer) if is_patches else None
