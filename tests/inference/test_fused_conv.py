"""Fused convolutions for GPUs equal the layers that they replace."""

import copy

import pytest
import torch
from mmcv.cnn import ConvModule
from torch import nn

from slab_det.inference.gpu.layers import fused_conv
from slab_det.measure.cost import count_multiply_adds

LAYERS = {
    '3x3': nn.Conv2d(8, 12, 3, padding=1),
    '1x1': nn.Conv2d(8, 12, 1),
    '1x1, padded': nn.Conv2d(8, 12, 1, padding=1),
    '1x1, strided': nn.Conv2d(8, 12, 1, stride=2),
    '1x1, groups': nn.Conv2d(8, 12, 1, groups=4),
    '3x3, ReLU': ConvModule(8, 12, 3, padding=1),
    '1x1, ReLU': ConvModule(8, 12, 1),
    'no ReLU': ConvModule(8, 12, 3, act_cfg=None),
}
OTHERS = {
    'activation first': ConvModule(8, 12, 1, order=('act', 'conv', 'norm')),
    'norm': ConvModule(8, 12, 1, norm_cfg=dict(type='BN')),
    'other activation': ConvModule(8, 12, 1, act_cfg=dict(type='SiLU')),
    'no bias': nn.Conv2d(8, 12, 1, bias=False),
    'reflected padding': nn.Conv2d(8, 12, 3, padding=1, padding_mode='reflect'),
}


@pytest.mark.parametrize('name', LAYERS)
def test_fused_convolution_equals_its_layer(name):
    layer, x = LAYERS[name].eval(), torch.randn(2, 8, 9, 11)
    fused = fused_conv(copy.deepcopy(layer))
    torch.testing.assert_close(fused(x), layer(x), msg=lambda text: f'{name}: {text}')
    counts = [count_multiply_adds(lambda form=form: form(x)) for form in (fused, layer)]
    assert counts[0] == counts[1] > 0, (name, counts)


@pytest.mark.parametrize('name', OTHERS)
def test_other_convolutions_are_not_replaced(name):
    assert fused_conv(copy.deepcopy(OTHERS[name])) is None, name
