"""Inputs and outputs of layers as tokens: the rows of a regression."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A fit reads at most this many tokens of an image. Of a larger map it reads every n-th row, so that at least this many
# positions are left. With a hundred images the widest layers of a Swin-T have some thirty rows for each column.
POSITIONS = 1024
GOLDEN_RATIO = (5**0.5 - 1) / 2


def sample_tokens(*parts: Tensor) -> list[Tensor]:
    """The same tokens of each tensor (B, ..., C), at most ``POSITIONS`` for each of B images, as (N, C)."""
    count = POSITIONS * len(parts[0])
    tokens = [part.flatten(0, -2) for part in parts]
    total = len(tokens[0])
    if total <= count:
        return tokens
    # Multiples of the golden ratio fall evenly, and into every row and column of windows; a fixed step may not.
    some = (torch.arange(count, dtype=torch.float64) * GOLDEN_RATIO % 1 * total).long()
    return [part[some.to(part.device)] for part in tokens]


def row_step(output: Tensor) -> int:
    """The step n of :func:`sample_rows`, which takes every n-th row of a map (B, C, H, W)."""
    return max(1, output.shape[-2] * output.shape[-1] // POSITIONS)


def sample_rows(output: Tensor) -> Tensor:
    """Every n-th row of a map, n from :func:`row_step`, as tokens (B, N, C_out)."""
    return output[:, :, :: row_step(output)].flatten(2).transpose(1, 2).clone()


def sample_patches(conv: nn.Conv2d, source: Tensor, output: Tensor) -> Tensor:
    """The input patches of a convolution for the rows of :func:`sample_rows`, (B, N, C_in k k)."""
    stride = conv.stride[0] * row_step(output), conv.stride[1]
    return F.unfold(source, conv.kernel_size, conv.dilation, conv.padding, stride).transpose(1, 2)


def input_tokens(layer: nn.Module, source: Tensor, output: Tensor) -> Tensor:
    """What some outputs of a layer are computed from, (..., columns): one column for each weight of an output. Of many
    regions it takes some."""
    if isinstance(layer, nn.ConvTranspose2d):
        return output_tokens(source)
    some = slice(None, None, _region_step(output))
    return sample_patches(layer, source[some], output[some]) if isinstance(layer, nn.Conv2d) else source


def apply_to_columns(layer: nn.Module, inputs: Tensor) -> Tensor:
    """The outputs (..., C_out) of a layer for :func:`input_tokens` (..., columns), without running it on whole maps.

    The layer is an nn.Linear or an nn.Conv2d; a transposed convolution has its columns elsewhere.
    """
    return F.linear(inputs, layer.weight.flatten(1), layer.bias)


def output_tokens(output: Tensor) -> Tensor:
    """The values of a map, or the outputs of a layer, for :func:`input_tokens`."""
    return sample_rows(output[:: _region_step(output)]) if output.ndim == 4 else output


def _region_step(output: Tensor) -> int:
    """The step in which regions are taken; 1 for what is no map of regions, which are small."""
    if output.ndim != 4 or output.shape[-2] * output.shape[-1] >= POSITIONS:
        return 1
    return max(1, len(output) * output.shape[-2] * output.shape[-1] // POSITIONS)
