"""Kernels of backbone and neck in Triton, which comes with PyTorch for CUDA, and compiles a kernel when it first runs.

Each function computes what operators of PyTorch compute; tests compare the two on a CPU, in Triton's interpreter.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from slab_det.attention.geometry import MASKED_LOGIT

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs
    triton = None

# Tokens and hidden channels of a program of an FFN, warps and stages: on an H100 within 5 % of the best of eight.
FFN_TILE = 64, 32, 4, 3
# Number of tiles of 64 slots whose keys one program sums.
SUM_TILES = 7
# Values of slots without a token: padding of the map has q, k and v, padding of N to a power of 2 has nothing.
PADDING, NOTHING = -1, -2


def take(x: Tensor) -> bool:
    """Whether kernels run for ``x``: on the current GPU, outside of torch.compile and autocast, which know none."""
    if triton is None or not x.is_cuda or torch.compiler.is_compiling():
        return False
    return x.device.index == torch.cuda.current_device() and not torch.is_autocast_enabled('cuda')


if triton is not None:

    @triton.jit
    def _window_kernel(
        qkv, padding, slots, regions, bias, out, scale, masked, L, NW,
        C: tl.constexpr, D: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr,
    ):  # fmt: skip
        # One head of one window: reads q, k and v from their tokens in the map, and writes to the tokens.
        window, head = tl.program_id(0), tl.program_id(1)
        image = (window // NW).to(tl.int64) * L
        slot, d = tl.arange(0, N), tl.arange(0, D)
        token = tl.load(slots + (window % NW) * N + slot)
        inside, padded = (token >= 0)[:, None], (token == -1)[:, None]
        row = image + tl.where(token >= 0, token, 0)
        channel = head * D + d
        at = qkv + row[:, None] * (3 * C) + channel[None, :]
        pad = padding + channel[None, :]
        q = tl.where(inside, tl.load(at, mask=inside, other=0.0), tl.where(padded, tl.load(pad), 0.0))
        k = tl.where(inside, tl.load(at + C, mask=inside, other=0.0), tl.where(padded, tl.load(pad + C), 0.0))
        v = tl.where(inside, tl.load(at + 2 * C, mask=inside, other=0.0), tl.where(padded, tl.load(pad + 2 * C), 0.0))
        logits = tl.dot(q, tl.trans(k), input_precision='tf32x3') * scale
        logits += tl.load(bias + head * N * N + slot[:, None] * N + slot[None, :]).to(tl.float32)
        if SHIFTED:
            region = tl.load(regions + (window % NW) * N + slot)
            logits = tl.where(region[:, None] != region[None, :], logits + masked, logits)
        weights = tl.exp(logits - tl.max(logits, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
        mixed = tl.dot(weights.to(q.dtype), v, input_precision='tf32x3')
        tl.store(out + row[:, None] * C + channel[None, :], mixed.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _window_sums_kernel(
        qkv, padding, slots, table, sums, L, NW, N,
        C: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    ):  # fmt: skip
        # Linear attention: k^T v and the sum of k over some slots of a window, for one head.
        window, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        image = (window // NW).to(tl.int64) * L
        d = tl.arange(0, D)
        channel = head * D + d
        product, total = tl.zeros([D, D], tl.float32), tl.zeros([D], tl.float32)
        for i in range(0, TILES):
            slot = (part * TILES + i) * TILE + tl.arange(0, TILE)
            token = tl.load(slots + (window % NW) * N + slot, mask=slot < N, other=-2)
            inside, known = (token >= 0)[:, None], (token >= -1)[:, None]
            row = image + tl.where(token >= 0, token, 0)
            at, pad = qkv + row[:, None] * (3 * C) + channel[None, :], padding + channel[None, :]
            k = tl.where(inside, tl.load(at + C, mask=inside, other=0.0), tl.load(pad + C)).to(tl.float32)
            v = tl.where(inside, tl.load(at + 2 * C, mask=inside, other=0.0), tl.load(pad + 2 * C)).to(tl.float32)
            k += tl.load(table + slot[:, None] * C + channel[None, :], mask=known, other=0.0).to(tl.float32)
            k, v = tl.where(known, tl.maximum(k, 0.0), 0.0), tl.where(known, v, 0.0)
            product += tl.dot(tl.trans(k), v, input_precision='tf32x3')
            total += tl.sum(k, 0)
        out = sums + ((window * tl.num_programs(1) + head) * tl.num_programs(2) + part) * (D + 1) * D
        tl.store(out + d[:, None] * D + d[None, :], product)
        tl.store(out + D * D + d, total)

    @triton.jit
    def _window_read_kernel(
        qkv, padding, slots, sums, weight, bias, out, L, NW, N, PARTS,
        C: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr,
    ):  # fmt: skip
        # Linear attention: the product of the queries of some slots with the sums, plus the convolution of the values.
        window, head = tl.program_id(0), tl.program_id(1)
        image = (window // NW).to(tl.int64) * L
        slot, d = tl.program_id(2) * TILE + tl.arange(0, TILE), tl.arange(0, D)
        channel = head * D + d
        product, total = tl.zeros([D, D], tl.float32), tl.zeros([D], tl.float32)
        for part in range(0, PARTS):
            at = sums + ((window * tl.num_programs(1) + head) * PARTS + part) * (D + 1) * D
            product += tl.load(at + d[:, None] * D + d[None, :])
            total += tl.load(at + D * D + d)
        places, pad = slots + (window % NW) * N, padding + (2 * C + channel)[None, :]
        token = tl.load(places + slot, mask=slot < N, other=-2)
        inside = (token >= 0)[:, None]
        row = image + tl.where(token >= 0, token, 0)
        q = tl.load(qkv + row[:, None] * (3 * C) + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        q = tl.maximum(q, 0.0)
        mixed = tl.dot(q, product, input_precision='tf32x3') / (tl.sum(q * total[None, :], 1) + 1e-6)[:, None]
        mixed += tl.load(bias + d)[None, :].to(tl.float32)
        for i in range(0, 25):
            y, x = slot // SIDE + i // 5 - 2, slot % SIDE + i % 5 - 2
            there = (y >= 0) & (y < SIDE) & (x >= 0) & (x < SIDE) & (slot < SIDE * SIDE)
            near = tl.load(places + y * SIDE + x, mask=there, other=-2)
            at = qkv + (image + tl.where(near >= 0, near, 0))[:, None] * (3 * C) + (2 * C + channel)[None, :]
            v = tl.where((near == -1)[:, None], tl.load(pad), tl.load(at, mask=(near >= 0)[:, None], other=0.0))
            mixed += v.to(tl.float32) * tl.load(weight + d * 25 + i)[None, :].to(tl.float32)
        tl.store(out + row[:, None] * C + channel[None, :], mixed.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _ffn_kernel(
        x, identity, w1, b1, w2, b2, out, R, H,
        C: tl.constexpr, A: tl.constexpr, B: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, HIDDEN: tl.constexpr,
    ):  # fmt: skip
        # Some tokens, and all hidden channels in turns: these never leave the chip. C is A + B, powers of 2 or B = 0.
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        known = (row < R)[:, None]
        a = tl.arange(0, A)
        xa = tl.load(x + row[:, None] * C + a[None, :], mask=known, other=0.0)
        sum_a = tl.zeros([ROWS, A], tl.float32)
        if B > 0:
            b = A + tl.arange(0, B)
            xb = tl.load(x + row[:, None] * C + b[None, :], mask=known, other=0.0)
            sum_b = tl.zeros([ROWS, B], tl.float32)
        for start in range(0, H, HIDDEN):
            h = start + tl.arange(0, HIDDEN)
            there = h < H
            hidden = tl.dot(xa, tl.load(w1 + h[None, :] * C + a[:, None], mask=there[None, :], other=0.0))
            if B > 0:
                hidden = tl.dot(xb, tl.load(w1 + h[None, :] * C + b[:, None], mask=there[None, :], other=0.0), hidden)
            hidden += tl.load(b1 + h, mask=there, other=0.0)[None, :].to(tl.float32)
            if GELU:
                hidden = 0.5 * hidden * (1 + tl.erf(hidden * 0.7071067811865476))
            else:
                hidden = tl.where(hidden > 0, hidden, 0.0)
            hidden = hidden.to(x.dtype.element_ty)
            sum_a = tl.dot(hidden, tl.load(w2 + a[None, :] * H + h[:, None], mask=there[:, None], other=0.0), sum_a)
            if B > 0:
                sum_b = tl.dot(hidden, tl.load(w2 + b[None, :] * H + h[:, None], mask=there[:, None], other=0.0), sum_b)
        at = row[:, None] * C + a[None, :]
        sum_a += tl.load(b2 + a)[None, :].to(tl.float32) + tl.load(identity + at, mask=known, other=0.0).to(tl.float32)
        tl.store(out + at, sum_a.to(out.dtype.element_ty), mask=known)
        if B > 0:
            at = row[:, None] * C + b[None, :]
            sum_b += tl.load(b2 + b)[None, :].to(tl.float32)
            sum_b += tl.load(identity + at, mask=known, other=0.0).to(tl.float32)
            tl.store(out + at, sum_b.to(out.dtype.element_ty), mask=known)

    @triton.jit
    def _add_bias_kernel(x, bias, N, C, BLOCK: tl.constexpr):
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        known = i < N
        tl.store(x + i, tl.load(x + i, mask=known) + tl.load(bias + i % C, mask=known), mask=known)

    @triton.jit
    def _add_upsampled_kernel(
        x, coarse, N, H, W, h, w, scale_y, scale_x, C: tl.constexpr, CHANNELS: tl.constexpr, PIXELS: tl.constexpr
    ):
        # Adds to some pixels the nearest pixels of the coarser map, as F.interpolate finds them.
        pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
        image, place = pixel // (H * W), pixel % (H * W)
        row = tl.minimum(tl.floor((place // W).to(tl.float32) * scale_y).to(tl.int32), h - 1)
        column = tl.minimum(tl.floor((place % W).to(tl.float32) * scale_x).to(tl.int32), w - 1)
        channel = tl.arange(0, CHANNELS)
        known = (pixel < N)[:, None] & (channel < C)[None, :]
        at = x + pixel.to(tl.int64)[:, None] * C + channel[None, :]
        source = coarse + ((image * h + row) * w + column).to(tl.int64)[:, None] * C + channel[None, :]
        tl.store(at, tl.load(at, mask=known) + tl.load(source, mask=known), mask=known)


def window_attention(
    qkv: Tensor, padding: Tensor, slots: Tensor, regions: Tensor | None, bias: Tensor, scale: float
) -> Tensor:
    """``softmax(q k^T scale + B) v`` in the windows of a map, for each head.

    Args:
        qkv: (B, H * W, 3C).
        padding: q, k and v of slots of padding, (3C,).
        slots: The token in each slot, (nW, N), or ``PADDING`` or ``NOTHING``; N is a power of 2.
        regions: The region of each slot of a shifted map, (nW, N); pairs of two regions get ``MASKED_LOGIT``.
        bias: B, (h, N, N).
        scale: Factor of the logits.

    Returns:
        (B, H * W, C).
    """
    images, tokens, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    out = torch.empty(images, tokens, channels, dtype=qkv.dtype, device=qkv.device)
    _window_kernel[(images * len(slots), len(bias))](
        qkv, padding, slots, slots if regions is None else regions, bias, out, scale, MASKED_LOGIT, tokens, len(slots),
        C=channels, D=channels // len(bias), N=slots.shape[1], SHIFTED=regions is not None,
    )  # fmt: skip
    return out


def linear_window_attention(
    qkv: Tensor, padding: Tensor, slots: Tensor, table: Tensor, weight: Tensor, bias: Tensor, heads: int
) -> Tensor:
    """Simplified linear attention in the windows of a map (SLAB, eq. 5-7), before the output projection.

    Args:
        qkv: (B, H * W, 3C).
        padding: q, k and v of slots of padding, (3C,).
        slots: The token in each slot, (nW, N), or ``PADDING`` or ``NOTHING``.
        table: The positional encoding of the keys, (w * w, C).
        weight: Weight of the depthwise convolution of the values, (C / h, 1, 5, 5).
        bias: Bias of this convolution, (C / h,).
        heads: Heads h.

    Returns:
        (B, H * W, C).
    """
    images, tokens, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    windows, size, dims = images * len(slots), slots.shape[1], channels // heads
    parts = triton.cdiv(size, 64 * SUM_TILES)
    sums = torch.empty(windows, heads, parts, dims + 1, dims, dtype=torch.float32, device=qkv.device)
    out = torch.empty(images, tokens, channels, dtype=qkv.dtype, device=qkv.device)
    _window_sums_kernel[(windows, heads, parts)](
        qkv, padding, slots, table, sums, tokens, len(slots), size, C=channels, D=dims, TILE=64, TILES=SUM_TILES
    )
    _window_read_kernel[(windows, heads, triton.cdiv(size, 64))](
        qkv, padding, slots, sums, weight, bias, out, tokens, len(slots), size, parts,
        C=channels, D=dims, TILE=64, SIDE=math.isqrt(len(table)),
    )  # fmt: skip
    return out


def ffn(x: Tensor, identity: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, activation: str) -> Tensor:
    """``identity + fc2(act(fc1(x)))`` of tokens (B, L, C) in half precision.

    Args:
        x: Tokens.
        identity: Residuals, of the same shape.
        w1: Weight of fc1, (H, C).
        b1: Bias of fc1, (H,).
        w2: Weight of fc2, (C, H).
        b2: Bias of fc2, (C,).
        activation: 'gelu' (by erf) or 'relu'.
    """
    x, identity, out = x.contiguous(), identity.contiguous(), torch.empty_like(identity)
    channels = x.shape[-1]
    first = 1 << (channels.bit_length() - 1)
    count, (size, hidden, warps, stages) = x.numel() // channels, FFN_TILE
    _ffn_kernel[(triton.cdiv(count, size),)](
        x, identity, w1, b1, w2, b2, out, count, len(w1),
        C=channels, A=first, B=channels - first,
        GELU=activation == 'gelu', ROWS=size, HIDDEN=hidden, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def add_bias(x: Tensor, bias: Tensor) -> Tensor:
    """Adds a bias (C,) to a map (N, C, H, W), channels last, in place."""
    _add_bias_kernel[(triton.cdiv(x.numel(), 1024),)](x, bias, x.numel(), len(bias), BLOCK=1024)
    return x


def add_upsampled(x: Tensor, coarse: Tensor) -> Tensor:
    """``x + F.interpolate(coarse, x.shape[2:])`` of maps (N, C, H, W), channels last; written into ``x``."""
    x, coarse = (level.contiguous(memory_format=torch.channels_last) for level in (x, coarse))
    images, channels, height, width = x.shape
    h, w = coarse.shape[2:]
    pixels = images * height * width
    _add_upsampled_kernel[(triton.cdiv(pixels, 8),)](
        x, coarse, pixels, height, width, h, w, h / height, w / width,
        C=channels, CHANNELS=triton.next_power_of_2(channels), PIXELS=8,
    )  # fmt: skip
    return x
