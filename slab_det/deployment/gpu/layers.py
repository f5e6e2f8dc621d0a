"""Convolutions and FPN that launch fewer kernels: bias and activation are fused, maps stay channels last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from mmcv.cnn import ConvModule
from mmdet.models.necks import FPN
from torch import Tensor, nn

from slab_det.deployment.box_operators import flat
from slab_det.deployment.gpu import kernels


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
            out = product(flat(x, x.shape[1]), self.weight.flatten(1), self.bias)
            return out.view(x.shape[0], *x.shape[2:], -1).permute(0, 3, 1, 2)
        options = self.stride, self.padding, self.dilation, self.groups
        if not kernels.can_run(x) or x.dtype.itemsize > 4:
            out = F.conv2d(x, self.weight, self.bias, *options)
            return out.relu_() if relu else out
        if relu:
            return torch.cudnn_convolution_relu(x, self.weight, self.bias, *options)
        # PyTorch would add the bias in a separate, slow kernel.
        out = F.conv2d(x, self.weight, None, *options).contiguous(memory_format=torch.channels_last)
        return kernels.add_bias(out, self.bias)


def fused_conv(layer: nn.Module) -> FusedConv | None:
    """Turns a convolution, or a ConvModule of convolution and ReLU, into a FusedConv in place; or returns None."""
    conv, relu = layer, False
    if type(layer) is ConvModule:
        conv, relu = layer.conv, layer.with_activation
        others = layer.with_norm or layer.with_spectral_norm or layer.with_explicit_padding or layer.order[0] != 'conv'
        if others or (relu and type(layer.activate) is not nn.ReLU):
            return None
    if type(conv) is not nn.Conv2d or conv.bias is None or conv.padding_mode != 'zeros' or type(conv.padding) is str:
        return None
    conv.__class__, conv.relu = FusedConv, relu
    return conv


class FusedFPN(FPN):
    """mmdet's FPN without extra convolutions; one kernel upsamples a level and adds it to the finer level."""

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if not kernels.can_run(inputs[0]):
            return super().forward(inputs)
        laterals = [conv(inputs[i + self.start_level]) for i, conv in enumerate(self.lateral_convs)]
        for i in range(len(laterals) - 1, 0, -1):
            laterals[i - 1] = kernels.add_upsampled(laterals[i - 1], laterals[i])
        outs = [conv(x) for conv, x in zip(self.fpn_convs, laterals, strict=True)]
        while len(outs) < self.num_outs:
            outs.append(outs[-1][:, :, ::2, ::2].contiguous(memory_format=torch.channels_last))
        return tuple(outs)


def fuse_fpn(model: nn.Module) -> None:
    """Turns the FPN of a detector into a FusedFPN in place; other necks stay as they are."""
    neck = getattr(model, 'neck', None)
    if type(neck) is FPN and neck.upsample_cfg == dict(mode='nearest') and not neck.add_extra_convs:
        neck.__class__ = FusedFPN
