"""Convolutions and FPN that launch fewer kernels: bias and activation are fused, maps stay channels last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from mmcv.cnn import ConvModule
from mmdet.models.necks import FPN
from torch import Tensor, nn

from slab_det.common.modules import as_class
from slab_det.families.layers import FusedConv
from slab_det.inference.gpu import kernels


class TritonConv(FusedConv):
    """A :class:`~slab_det.families.layers.FusedConv` with a kernel for its bias where kernels run."""

    def convolve(self, x: Tensor, relu: bool) -> Tensor:
        if not kernels.can_run(x) or x.dtype.itemsize > 4:
            return super().convolve(x, relu)
        options = self.stride, self.padding, self.dilation, self.groups
        if relu:
            return torch.cudnn_convolution_relu(x, self.weight, self.bias, *options)
        # PyTorch would add the bias in a separate, slow kernel.
        out = F.conv2d(x, self.weight, None, *options).contiguous(memory_format=torch.channels_last)
        return kernels.add_bias(out, self.bias)


def fused_conv(layer: nn.Module) -> TritonConv | None:
    """The TritonConv of a convolution, or of a ConvModule of convolution and ReLU; None for every other layer."""
    conv, relu = layer, False
    if type(layer) is ConvModule:
        conv, relu = layer.conv, layer.with_activation
        others = layer.with_norm or layer.with_spectral_norm or layer.with_explicit_padding or layer.order[0] != 'conv'
        if others or (relu and type(layer.activate) is not nn.ReLU):
            return None
    if type(conv) is not nn.Conv2d or conv.bias is None or conv.padding_mode != 'zeros' or type(conv.padding) is str:
        return None
    fused = as_class(conv, TritonConv)
    fused.relu = relu
    return fused


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


def fused_fpn(layer: nn.Module) -> FusedFPN | None:
    """The FusedFPN of an FPN; None for every other layer."""
    known = type(layer) is FPN and layer.upsample_cfg == dict(mode='nearest') and not layer.add_extra_convs
    return as_class(layer, FusedFPN) if known else None
