"""The check that a Triton kernel can run, and the kernels of convolutions and of the FPN.

Triton comes with PyTorch for CUDA, and compiles a kernel when the kernel first runs. The first comment of a kernel
says what one program computes. Without a GPU, tests run the kernels in Triton's interpreter.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs
    triton = None

# The smallest matrix side that tl.dot accepts.
MIN_SIDE = 16


def can_run(x: Tensor) -> bool:
    """Whether kernels can run on ``x``: it is on the current GPU, and nothing observes or changes operators."""
    if triton is None or not x.is_cuda or not runs_as_written():
        return False
    return x.device.index == torch.cuda.current_device()


def runs_as_written() -> bool:
    """Whether nothing observes or changes operators on a GPU: no torch.compile, autocast or dispatch mode."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled('cuda'):
        return False
    # Such as FlopCounterMode, which knows PyTorch's operators alone, and sees none in a replay.
    return _get_current_dispatch_mode() is None


if triton is not None:

    @triton.jit
    def _add_bias_kernel(x, bias, N, C, BLOCK: tl.constexpr):
        # Adds the bias to BLOCK values of a channels-last map.
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        known = i < N
        tl.store(x + i, tl.load(x + i, mask=known) + tl.load(bias + i % C, mask=known), mask=known)

    @triton.jit
    def _add_upsampled_kernel(
        x, coarse, N, H, W, h, w, scale_y, scale_x, C: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr
    ):
        # Adds the nearest pixels of the coarse map, as F.interpolate chooses them, to PIXELS pixels of x.
        pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
        image, inside = pixel // (H * W), pixel % (H * W)
        row = tl.minimum(tl.floor((inside // W).to(tl.float32) * scale_y).to(tl.int32), h - 1)
        column = tl.minimum(tl.floor((inside % W).to(tl.float32) * scale_x).to(tl.int32), w - 1)
        channel = tl.arange(0, CHANNELS)
        known = (pixel < N)[:, None] & (channel < C)[None, :]
        at = x + pixel.to(tl.int64)[:, None] * C + channel[None, :]
        source = coarse + ((image * h + row) * w + column).to(tl.int64)[:, None] * C + channel[None, :]
        tl.store(at, tl.load(at, mask=known) + tl.load(source, mask=known), mask=known)


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """Adds a bias (C,) to a channels-last map (N, C, H, W) in place."""
    _add_bias_kernel[(triton.cdiv(x.numel(), 1024),)](x, bias, x.numel(), len(bias), BLOCK=1024)
    return x


def add_upsampled(x: Tensor, coarse: Tensor) -> Tensor:
    """Adds ``F.interpolate(coarse, x.shape[2:])`` to a map ``x`` (N, C, H, W), in place if ``x`` is channels last."""
    x, coarse = (level.contiguous(memory_format=torch.channels_last) for level in (x, coarse))
    images, channels, height, width = x.shape
    h, w = coarse.shape[2:]
    pixels = images * height * width
    _add_upsampled_kernel[(triton.cdiv(pixels, 8),)](
        x, coarse, pixels, height, width, h, w, h / height, w / width,
        C=channels, CHANNELS=triton.next_power_of_2(channels), PIXELS=8,
    )  # fmt: skip
    return x
