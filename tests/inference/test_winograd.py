import pytest
import torch
from conftest import relative_difference
from torch import nn

from slab_det.inference.cpu import winograd
from slab_det.inference.cpu.winograd import WinogradConv, winograd_conv

SIZES = [(1, 5, 8, 8), (3, 5, 13, 19), (2, 4, 1, 1), (1, 3, 2, 30), (5, 4, 14, 14)]


@pytest.mark.parametrize('chunk', [3, 512])
@pytest.mark.parametrize('size', SIZES)
@torch.no_grad()
def test_output_equals_the_convolution(monkeypatch, size, chunk):
    monkeypatch.setattr(winograd, 'CHUNK_TILES', chunk)
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(size, dtype=torch.float64).to(memory_format=memory_format)
        for bias in (True, False):
            conv = nn.Conv2d(size[1], 7, 3, padding=1, bias=bias).double()
            torch.testing.assert_close(WinogradConv(conv)(x), conv(x), rtol=0, atol=1e-13)


@torch.no_grad()
def test_float32_output_differs_by_rounding():
    conv, x = nn.Conv2d(256, 256, 3, padding=1), torch.randn(1, 256, 20, 20)
    expected = conv.double()(x.double())
    deployed = WinogradConv(conv.float())
    assert relative_difference([deployed(x)], [expected]) < 3e-5
    with torch.autocast('cpu', torch.bfloat16):
        assert relative_difference([deployed(x)], [expected]) < 3e-5


def test_only_plain_3x3_convolutions_with_many_channels_are_replaced():
    channels = winograd.MIN_CHANNELS
    for changes in (
        dict(stride=2),
        dict(padding=0),
        dict(dilation=2),
        dict(kernel_size=1),
        dict(groups=2),
        dict(padding_mode='reflect'),
        dict(in_channels=channels - 1),
    ):
        arguments = dict(in_channels=channels, out_channels=channels, kernel_size=3, padding=1)
        assert winograd_conv(nn.Conv2d(**arguments)) is not None
        assert winograd_conv(nn.Conv2d(**arguments | changes)) is None, changes

    class OwnConv(nn.Conv2d):
        pass

    assert winograd_conv(OwnConv(channels, channels, 3, padding=1)) is None
