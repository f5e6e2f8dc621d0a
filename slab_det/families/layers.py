"""Layers with their activation in the same product or convolution."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slab_det.families.operators import to_rows


def linear_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``ReLU(x weight^T + bias)`` of x (n, C) and a weight (C_out, C)."""
    if not hasattr(torch, '_addmm_activation'):
        return torch.addmm(bias, x, weight.t()).relu_()
    return torch._addmm_activation(bias, x, weight.t())


class FusedConv(nn.Conv2d):
    """A convolution of channels-last maps (N, C, H, W), fused with its bias and, if ``relu``, with a ReLU."""

    relu = False

    def forward(self, x: Tensor, relu: bool = False) -> Tensor:
        relu = relu or self.relu
        if self.kernel_size == self.stride == (1, 1) and self.padding == (0, 0) and self.groups == 1:
            product = linear_relu if relu else F.linear
            out = product(to_rows(x, x.shape[1]), self.weight.flatten(1), self.bias)
            return out.view(x.shape[0], *x.shape[2:], -1).permute(0, 3, 1, 2)
        return self.convolve(x, relu)

    def convolve(self, x: Tensor, relu: bool) -> Tensor:
        """The convolution, and the ReLU if ``relu``."""
        out = F.conv2d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)
        return out.relu_() if relu else out
