"""Convolutions, FPN and heads that launch fewer kernels: bias and activation are fused, maps stay channels last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from mmcv.cnn import ConvModule
from mmdet.models.dense_heads import RPNHead
from mmdet.models.necks import FPN
from mmdet.models.roi_heads.bbox_heads import ConvFCBBoxHead
from mmdet.models.roi_heads.mask_heads import FCNMaskHead
from torch import Tensor, nn

from slab_det.deployment.detection import flat
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


class RPN:
    """Computes the logits (n_i,) of the anchors of each level, and the deltas (A, 4) of all anchors.

    Args:
        head: The RPN.
        fused: Whether one product with copied weights gives logits and deltas; ignored unless rpn_conv is a FusedConv.
    """

    def __init__(self, head: RPNHead, fused: bool) -> None:
        self.head = head
        is_stock = (type(head).forward, type(head).forward_single) == (RPNHead.forward, RPNHead.forward_single)
        self.fused = fused and is_stock and type(head.rpn_conv) is FusedConv
        if self.fused:
            layers = head.rpn_cls, head.rpn_reg
            # Pads the rows of ``outputs`` to a multiple of 16 bytes.
            missing = -sum(layer.out_channels for layer in layers) % 8
            self.weight = F.pad(torch.cat([layer.weight.flatten(1) for layer in layers]), (0, 0, 0, missing)).detach()
            self.bias = F.pad(torch.cat([layer.bias for layer in layers]), (0, missing)).detach()

    def __call__(self, features: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        if not self.fused:
            logits, deltas = self.head(features)
            return [flat(x, 1)[:, 0] for x in logits], torch.cat([flat(x, 4) for x in deltas])
        sizes = [len(x) * x.shape[2] * x.shape[3] for x in features]
        outputs = features[0].new_empty(sum(sizes), len(self.weight), dtype=self.weight.dtype)
        for part, x in zip(outputs.split(sizes), features, strict=True):
            hidden = self.head.rpn_conv(x.to(self.weight.dtype), relu=True)
            torch.addmm(self.bias, flat(hidden, hidden.shape[1]), self.weight.t(), out=part)
        anchors = self.head.rpn_cls.out_channels
        logits, deltas = outputs[:, :anchors].float(), outputs[:, anchors : 5 * anchors]
        return list(logits.flatten().split([anchors * size for size in sizes])), deltas.reshape(-1, 4).float()


class BoxHead:
    """Computes class logits (n, classes + 1) and deltas (n, 4 classes) of regions (n, C, h, w).

    Args:
        head: The bbox_head.
        fused: Whether copied weights read channels-last regions; ignored unless the head has linear layers only.
    """

    def __init__(self, head: nn.Module, fused: bool) -> None:
        self.head, self.fused = head, fused and _is_linear(head)
        if self.fused:
            first, *others = head.shared_fcs
            by_place = first.weight.detach().unflatten(1, (head.in_channels, *head.roi_feat_size))
            self.shared = [(by_place.permute(0, 2, 3, 1).flatten(1), first.bias)]
            self.shared += [(layer.weight, layer.bias) for layer in others]
            self.weight = torch.cat([head.fc_cls.weight, head.fc_reg.weight]).detach()
            self.bias = torch.cat([head.fc_cls.bias, head.fc_reg.bias]).detach()

    def __call__(self, regions: Tensor) -> tuple[Tensor, Tensor]:
        if not self.fused:
            return self.head(regions)
        x = regions.permute(0, 2, 3, 1).flatten(1).to(self.weight.dtype)
        for weight, bias in self.shared:
            x = linear_relu(x, weight, bias)
        outputs = F.linear(x, self.weight, self.bias).float()
        return outputs.split([self.head.fc_cls.out_features, self.head.fc_reg.out_features], 1)


def _is_linear(head: nn.Module) -> bool:
    """Whether a head has only shared linear layers with ReLU, and one linear layer each for classes and boxes."""
    if type(head).forward is not ConvFCBBoxHead.forward or head.with_avg_pool or not head.num_shared_fcs:
        return False
    others = *head.shared_convs, *head.cls_convs, *head.cls_fcs, *head.reg_convs, *head.reg_fcs
    return not others and all(type(x) is nn.Linear for x in (*head.shared_fcs, head.fc_cls, head.fc_reg))


class MaskHead:
    """Computes mask logits (n, 28, 28) of regions (n, C, 14, 14), each for the label of its region.

    Args:
        head: The mask_head.
        fused: Whether other labels' masks are left out; ignored unless a transposed convolution upsamples by 2.
    """

    def __init__(self, head: FCNMaskHead, fused: bool) -> None:
        self.head = head
        up, last = head.upsample, head.conv_logits
        self.fused = fused and type(head).forward is FCNMaskHead.forward and type(up) is nn.ConvTranspose2d
        self.fused = self.fused and up.kernel_size == up.stride == (2, 2) and isinstance(last, nn.Conv2d)
        if self.fused:
            # One product upsamples: each quarter of its columns is one of the four pixels that replace a pixel.
            self.up_weight = up.weight.detach().permute(2, 3, 1, 0).flatten(0, 2).contiguous()
            self.up_bias = up.bias.detach().repeat(4)

    def __call__(self, regions: Tensor, labels: Tensor) -> Tensor:
        head = self.head
        if head.class_agnostic:
            labels = torch.zeros_like(labels)
        if not self.fused:
            return head(regions)[torch.arange(len(labels), device=labels.device), labels]
        x = regions.to(self.up_weight.dtype)
        for conv in head.convs:
            x = conv(x)
        count, _, height, width = x.shape
        x = linear_relu(flat(x, x.shape[1]), self.up_weight, self.up_bias).view(count, height * width * 4, -1)
        weight, bias = head.conv_logits.weight.flatten(1)[labels], head.conv_logits.bias[labels]
        logits = torch.bmm(x, weight[:, :, None])[..., 0].float() + bias[:, None].float()
        return logits.view(count, height, width, 2, 2).transpose(2, 3).reshape(count, 2 * height, 2 * width)
