"""Window attention as kernels that read and write each token where the map has it, without copying windows."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slab_det.attention import ShiftedWindowAttention, SoftmaxWindowAttention
from slab_det.attention.geometry import MASKED_LOGIT
from slab_det.attention.linear import SimplifiedWindowAttention
from slab_det.attention.window_index import WindowIndex
from slab_det.families.constants import constant
from slab_det.inference.gpu import kernels
from slab_det.inference.gpu.kernels import MIN_SIDE, triton

# Slots without a token: PADDING pads the map and has q, k and v; NOTHING pads N to a power of 2 and has none.
PADDING, NOTHING = -1, -2
# Logit of NOTHING slots: their weight is 0 after softmax, and the logit is finite in every dtype.
EXCLUDED_LOGIT = -1e4
# Number of tiles, of 64 slots each, that one program sums.
SUM_TILES = 7
# The most head channels and slots that one program holds.
MAX_HEAD_DIMS, MAX_SLOTS = 128, 256

if triton is not None:
    import triton.language as tl

    @triton.jit
    def _window_softmax_kernel(
        qkv, padding, slots, regions, bias, out, scale, masked, L, NW,
        C: tl.constexpr, D: tl.constexpr, N: tl.constexpr, SHIFTED: tl.constexpr,
    ):  # fmt: skip
        # Computes softmax attention of one head in one window.
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
        # Linear attention, first kernel: sums k^T v and k of one head over TILES tiles of slots of one window.
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
    def _window_output_kernel(
        qkv, padding, slots, sums, weight, bias, out, L, NW, N, PARTS,
        C: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, SIDE: tl.constexpr,
    ):  # fmt: skip
        # Linear attention, second kernel: multiplies the queries of TILE slots by the sums, and adds a 5x5 conv of v.
        window, head = tl.program_id(0), tl.program_id(1)
        image = (window // NW).to(tl.int64) * L
        slot, d = tl.program_id(2) * TILE + tl.arange(0, TILE), tl.arange(0, D)
        channel = head * D + d
        product, total = tl.zeros([D, D], tl.float32), tl.zeros([D], tl.float32)
        for part in range(0, PARTS):
            at = sums + ((window * tl.num_programs(1) + head) * PARTS + part) * (D + 1) * D
            product += tl.load(at + d[:, None] * D + d[None, :])
            total += tl.load(at + D * D + d)
        own_slots, pad = slots + (window % NW) * N, padding + (2 * C + channel)[None, :]
        token = tl.load(own_slots + slot, mask=slot < N, other=-2)
        inside = (token >= 0)[:, None]
        row = image + tl.where(token >= 0, token, 0)
        q = tl.load(qkv + row[:, None] * (3 * C) + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        q = tl.maximum(q, 0.0)
        mixed = tl.dot(q, product, input_precision='tf32x3') / (tl.sum(q * total[None, :], 1) + 1e-6)[:, None]
        mixed += tl.load(bias + d)[None, :].to(tl.float32)
        for i in range(0, 25):
            y, x = slot // SIDE + i // 5 - 2, slot % SIDE + i % 5 - 2
            there = (y >= 0) & (y < SIDE) & (x >= 0) & (x < SIDE) & (slot < SIDE * SIDE)
            near = tl.load(own_slots + y * SIDE + x, mask=there, other=-2)
            at = qkv + (image + tl.where(near >= 0, near, 0))[:, None] * (3 * C) + (2 * C + channel)[None, :]
            v = tl.where((near == -1)[:, None], tl.load(pad), tl.load(at, mask=(near >= 0)[:, None], other=0.0))
            mixed += v.to(tl.float32) * tl.load(weight + d * 25 + i)[None, :].to(tl.float32)
        tl.store(out + row[:, None] * C + channel[None, :], mixed.to(out.dtype.element_ty), mask=inside)


class TritonWindowAttention(nn.Module):
    """A :class:`~slab_det.attention.ShiftedWindowAttention` that runs as kernels.

    Args:
        attention: Softmax or simplified attention, whose parameters are shared. It runs unchanged where kernels cannot.

    Attributes:
        bias: The position bias of each pair of slots, (h, N, N), with N rounded up to a power of 2; None for
            simplified attention.

    Shape:
        (B, H * W, C) -> (B, H * W, C).
    """

    def __init__(self, attention: ShiftedWindowAttention) -> None:
        super().__init__()
        self.attention = attention
        bias, w_msa = None, attention.w_msa
        if isinstance(w_msa, SoftmaxWindowAttention):
            bias = w_msa.relative_position_bias_table.detach()[w_msa.relative_position_index.flatten()]
            bias = bias.view(w_msa.window_size**2, w_msa.window_size**2, -1).permute(2, 0, 1)
            missing = _round_up(w_msa.window_size**2) - w_msa.window_size**2
            bias = F.pad(F.pad(bias, (0, missing), value=EXCLUDED_LOGIT), (0, 0, 0, missing)).contiguous()
        self.register_buffer('bias', bias, persistent=False)

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor | None = None) -> Tensor:
        w_msa, shift = self.attention.w_msa, self.attention.shift_size
        if not kernels.can_run(x) or x.dtype.itemsize > 4:
            return self.attention(x, hw_shape, identity)
        slots, regions = find_slots(*hw_shape, w_msa.window_size, shift, x.device)
        qkv = w_msa.qkv(x)
        inputs = qkv, w_msa.padding_row().to(qkv.dtype), slots
        out = w_msa.proj(self._mix_linear(*inputs) if self.bias is None else self._mix_softmax(*inputs, regions))
        return out if identity is None else out.add_(identity)

    def _mix_softmax(self, qkv: Tensor, padding: Tensor, slots: Tensor, regions: Tensor | None) -> Tensor:
        """``softmax(q k^T scale + B) v`` for q, k and v of all heads in (B, H * W, 3C)."""
        images, tokens, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        out = torch.empty(images, tokens, channels, dtype=qkv.dtype, device=qkv.device)
        _window_softmax_kernel[(images * len(slots), len(self.bias))](
            qkv, padding, slots, slots if regions is None else regions, self.bias, out, self.attention.w_msa.qk_scale,
            MASKED_LOGIT, tokens, len(slots),
            C=channels, D=channels // len(self.bias), N=slots.shape[1], SHIFTED=regions is not None,
        )  # fmt: skip
        return out

    def _mix_linear(self, qkv: Tensor, padding: Tensor, slots: Tensor) -> Tensor:
        """Simplified linear attention (SLAB, eq. 5-7) for q, k and v of all heads in (B, H * W, 3C)."""
        w_msa = self.attention.w_msa
        heads, conv, table = w_msa.num_heads, w_msa.dwc, w_msa.positional_encoding[0]
        images, tokens, channels = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
        windows, size, dims = images * len(slots), slots.shape[1], channels // heads
        parts = triton.cdiv(size, 64 * SUM_TILES)
        sums = torch.empty(windows, heads, parts, dims + 1, dims, dtype=torch.float32, device=qkv.device)
        out = torch.empty(images, tokens, channels, dtype=qkv.dtype, device=qkv.device)
        _window_sums_kernel[(windows, heads, parts)](
            qkv, padding, slots, table, sums, tokens, len(slots), size, C=channels, D=dims, TILE=64, TILES=SUM_TILES
        )
        _window_output_kernel[(windows, heads, triton.cdiv(size, 64))](
            qkv, padding, slots, sums, conv.weight, conv.bias, out, tokens, len(slots), size, parts,
            C=channels, D=dims, TILE=64, SIDE=math.isqrt(len(table)),
        )  # fmt: skip
        return out


@constant(256)
def find_slots(
    height: int, width: int, window_size: int, shift: int, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Returns the token and, for a shifted map, the region of each slot, (nW, N), with N rounded up to a power of 2."""
    index = WindowIndex(height, width, window_size, shift, device)
    missing = _round_up(window_size**2) - window_size**2
    tokens = torch.where(index.tokens == height * width, PADDING, index.tokens)
    regions = index.regions()
    return (
        F.pad(tokens, (0, missing), value=NOTHING).int(),
        None if regions is None else F.pad(regions, (0, missing)).int(),
    )


def triton_windows(layer: nn.Module) -> TritonWindowAttention | None:
    """Returns the Triton form of a window attention that fits into one program, or None for every other layer."""
    kinds = SoftmaxWindowAttention, SimplifiedWindowAttention
    if type(layer) is not ShiftedWindowAttention or type(layer.w_msa) not in kinds:
        return None
    w_msa = layer.w_msa
    fits = MIN_SIDE <= w_msa.head_dims <= MAX_HEAD_DIMS and w_msa.head_dims & (w_msa.head_dims - 1) == 0
    # A softmax program holds all pairs of slots: too many for windows such as SLAB's, of 56x56 slots.
    fits = fits and (type(w_msa) is SimplifiedWindowAttention or _round_up(w_msa.window_size**2) <= MAX_SLOTS)
    return TritonWindowAttention(layer) if fits else None


def _round_up(slots: int) -> int:
    return max(MIN_SIDE, 1 << (slots - 1).bit_length())
