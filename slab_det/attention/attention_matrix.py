"""Any attention as the matrices that its values are multiplied with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slab_det.attention.linear import LinearAttention

# Values probed at once times their numbers: 2^24 doubles are 128 MiB.
_CHUNK_ELEMENTS = 2**24


class AttentionMatrices(NamedTuple):
    """``out[:, c] = matrices[c] @ v[:, c] + offsets[c]`` for each channel c that was asked for.

    Attributes:
        matrices: (channels, N, M) for N queries and M values.
        offsets: (channels, N): what comes out where all values are 0, the bias of a convolution.
    """

    matrices: Tensor
    offsets: Tensor


@torch.no_grad()
def attention_matrices(mix: Callable[[Tensor], Tensor], values: Tensor, channels: Sequence[int]) -> AttentionMatrices:
    """The matrices of an attention whose queries and keys are given, found by mixing unit values.

    With fixed queries and keys every attention here is an affine map of the values that keeps channels apart:
    softmax weights, the normalised products of linear attention, and the depthwise convolution written out as a
    matrix. Value j set to 1 in every channel, all others to 0, gives column j of all those matrices at once. No
    formula is repeated, so this holds for every attention class, also for one yet to come.

    Args:
        mix: (B, M, C) values -> (B, N, C), before the output projection, the same queries and keys for each of B.
        values: (M, C), for shape, dtype and device.
        channels: Which to return; one head's channels share a matrix but for the convolution.
    """
    num_values, num_channels = values.shape
    channels = list(channels)
    offset = mix(values.new_zeros(1, num_values, num_channels))[0]
    matrices = values.new_empty(len(channels), offset.shape[0], num_values)
    chunk = max(1, _CHUNK_ELEMENTS // (num_channels * (num_values + offset.shape[0])))
    for first in range(0, num_values, chunk):
        units = torch.arange(first, min(first + chunk, num_values), device=values.device)
        probe = values.new_zeros(len(units), num_values, num_channels)
        probe[torch.arange(len(units), device=values.device), units] = 1
        columns = (mix(probe) - offset)[..., channels]
        matrices[:, :, units] = columns.permute(2, 1, 0)
    return AttentionMatrices(matrices, offset[:, channels].T)


@torch.no_grad()
def without_convolution(attention: nn.Module) -> nn.Module:
    """A copy of a linear attention whose depthwise convolution gives nothing.

    Raises:
        TypeError: If it has none.
    """
    if not isinstance(attention, LinearAttention):
        raise TypeError(f'{type(attention).__name__} has no convolution of the values')
    attention = copy.deepcopy(attention)
    for parameter in attention.dwc.parameters():
        parameter.zero_()
    return attention
