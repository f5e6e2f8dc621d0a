"""Runs an FFN as one kernel, which never writes the hidden channels to memory."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slab_det.backbones.blocks import ConvFFN, LinearFFN
from slab_det.fusion.channels import find_channels
from slab_det.inference.gpu import kernels
from slab_det.inference.gpu.kernels import MIN_SIDE, triton

# Tokens, hidden channels, warps and stages of a program: within 5 % of the best of eight settings on an H100.
TILE = 64, 32, 4, 3
ACTIVATIONS = {nn.GELU: 'gelu', nn.ReLU: 'relu'}
# The most channels that one program holds.
MAX_CHANNELS = 192

if triton is not None:
    import triton.language as tl

    @triton.jit
    def _ffn_kernel(
        x, identity, w1, b1, w2, b2, out, R, H,
        C: tl.constexpr, A: tl.constexpr, B: tl.constexpr, GELU: tl.constexpr, ROWS: tl.constexpr, HIDDEN: tl.constexpr,
    ):  # fmt: skip
        # Computes identity + fc2(act(fc1(x))) of ROWS tokens; HIDDEN hidden channels at a time stay on the chip.
        # The C channels are split into A and B channels: A is a power of 2, and B is a power of 2 or 0.
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


class TritonFFN(nn.Module):
    """Runs an FFN as one kernel in half precision, and unchanged otherwise.

    Args:
        ffn: The FFN, whose parameters are shared. It runs unchanged where the kernel cannot.
        fc1: Its first layer, linear or a 1x1 convolution.
        activation: 'gelu' or 'relu'.
        fc2: Its second layer.

    Shape:
        (B, L, C) -> (B, L, C).
    """

    def __init__(self, ffn: LinearFFN | ConvFFN, fc1: nn.Module, activation: str, fc2: nn.Module) -> None:
        super().__init__()
        self.ffn = ffn
        # In a tuple, so that they are no modules of this one too.
        self._layers = fc1, activation, fc2

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor) -> Tensor:
        if not kernels.can_run(x) or x.dtype not in (torch.float16, torch.bfloat16):
            return self.ffn(x, hw_shape, identity)
        fc1, activation, fc2 = self._layers
        # A 1x1 convolution's weight has two more dimensions.
        weights = fc1.weight.flatten(1), fc1.bias, fc2.weight.flatten(1), fc2.bias
        x, identity, out = x.contiguous(), identity.contiguous(), torch.empty_like(identity)
        channels, (rows, hidden, warps, stages) = x.shape[-1], TILE
        count, first = x.numel() // channels, 1 << (channels.bit_length() - 1)
        _ffn_kernel[(triton.cdiv(count, rows),)](
            x, identity, *weights, out, count, len(weights[0]), C=channels, A=first, B=channels - first,
            GELU=activation == 'gelu', ROWS=rows, HIDDEN=hidden, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return out


def triton_ffn(layer: nn.Module) -> TritonFFN | None:
    """Returns the Triton form of an FFN whose channels fit into one program, or None for every other layer."""
    if type(layer) not in (LinearFFN, ConvFFN):
        return None
    unit = find_channels(layer)['']
    # With other layers too, such as a convolution or a norm.
    if unit.reason or len(unit.between) > 1:
        return None
    fc1, activation, fc2 = map(layer.get_submodule, (*unit.writers, *unit.between, *unit.readers))
    if type(activation) not in ACTIVATIONS or getattr(activation, 'approximate', 'none') != 'none':
        return None
    if fc1.bias is None or fc2.bias is None:
        return None
    channels = len(fc2.weight)
    rest = channels - (1 << (channels.bit_length() - 1))
    fits = MIN_SIDE <= channels <= MAX_CHANNELS and (rest == 0 or (rest >= MIN_SIDE and rest & (rest - 1) == 0))
    return TritonFFN(layer, fc1, ACTIVATIONS[type(activation)], fc2) if fits else None
