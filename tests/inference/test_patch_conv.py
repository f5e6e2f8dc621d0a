import pytest
import torch
import torch.nn.functional as F
from torch import nn

from slab_det.compare.difference import rms_difference
from slab_det.inference.cpu.patch_conv import PatchConv, patch_conv


@pytest.mark.parametrize('channels_last', [True, False])
@pytest.mark.parametrize(
    ('channels', 'kernel', 'bias', 'size'),
    [((3, 8), 4, True, (16, 20)), ((16, 24), 8, False, (35, 17)), ((5, 7), (2, 3), True, (9, 9))],
    ids=str,
)
@torch.no_grad()
def test_patch_conv_is_the_convolution(channels, kernel, bias, size, channels_last):
    conv = nn.Conv2d(*channels, kernel, kernel, bias=bias)
    x = torch.randn(2, channels[0], *size)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    expected = F.conv2d(x.double(), conv.weight.double(), conv.bias.double() if bias else None, conv.stride)
    for dtype, bound in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 0.01)):
        found = PatchConv(conv).to(dtype)(x.to(dtype))
        assert rms_difference(found, expected) < bound and found.dtype == dtype
        assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize('width', range(8, 65, 4))
@torch.no_grad()
def test_patch_conv_is_right_in_bfloat16_at_odd_widths(width):
    """The kernels of oneDNN that this replaces are wrong at some of these widths on CPUs with AMX."""
    for kernel in (2, 4, 8):
        conv = nn.Conv2d(width, width, kernel, kernel).bfloat16()
        x = torch.randn(1, width, 32, 48).bfloat16()
        expected = F.conv2d(x.double(), conv.weight.double(), conv.bias.double(), kernel)
        error = rms_difference(PatchConv(conv)(x), expected)
        assert error < torch.finfo(torch.bfloat16).eps, (kernel, error)


class OwnConv(nn.Conv2d):
    pass


@pytest.mark.parametrize(
    'layer',
    [
        nn.Conv2d(4, 4, 1),
        nn.Conv2d(4, 4, 2, 1),
        nn.Conv2d(4, 4, 2, 2, padding=1),
        nn.Conv2d(4, 4, 2, 2, groups=2),
        nn.Conv2d(4, 4, 2, 2, dilation=2),
        OwnConv(4, 4, 2, 2),
        nn.ConvTranspose2d(4, 4, 2, 2),
    ],
)
def test_other_layers_stay(layer):
    assert patch_conv(layer) is None
