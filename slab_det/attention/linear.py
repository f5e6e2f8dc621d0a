"""Linear attention, for windows and for whole maps: simplified (SLAB, eq. 5-7) and focused (FLatten)."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LinearAttention(nn.Module):
    """Position table, linear attention and depthwise convolution: put before an attention class among the bases.

    That class projects in and out and has ``embed_dims``, ``num_heads``, ``head_dims`` and ``attn_drop_rate``; it
    decides which tokens are mixed. Position is a learned addend P of the keys, one per position.

    Args:
        num_positions: Rows of P.

    Raises:
        ValueError: If ``attn_drop_rate`` is not 0.
    """

    def __init__(self, *args, num_positions: int, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        if self.attn_drop_rate:
            raise ValueError('linear attention has no attention weights to drop: attn_drop_rate must be 0')
        self.positional_encoding = nn.Parameter(torch.zeros(1, num_positions, self.embed_dims))
        self.register_buffer(
            'head_mask',
            torch.block_diag(*[torch.ones(self.head_dims, self.head_dims)] * self.num_heads),
            persistent=False,
        )
        # One kernel for all heads.
        self.dwc = nn.Conv2d(self.head_dims, self.head_dims, 5, padding=2, groups=self.head_dims)

    @abstractmethod
    def query_features(self, q: Tensor) -> Tensor:
        """f(q), non-negative, (B, N, C); may write into q."""

    @abstractmethod
    def key_features(self, k: Tensor) -> Tensor:
        """f(k), non-negative, (B, M, C); may write into k."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, keep: Tensor | None = None) -> Tensor:
        """``f(q_i) (sum_j f(k_j + P_j)^T v_j) / (f(q_i) sum_j f(k_j + P_j) + 1e-6)`` per head, linear in N.

        Args:
            q: Queries (B, N, C), no view that autograd watches: they may be overwritten.
            k: Keys (B, M, C).
            v: Values (B, M, C).
            position: P, (1, M, C).
            keep: (B, M), False for keys that weigh nothing.

        Returns:
            (B, N, C), in float32 at least.
        """
        return self.read(q, self.summarize(k, v, position, keep))

    def summarize(self, k: Tensor, v: Tensor, position: Tensor, keep: Tensor | None = None) -> Tensor:
        """All that queries see of keys and values, (B, C, C + h): the first sum, block by block, beside the second."""
        # Sums over thousands of tokens and a quotient of them: not for half precision.
        k, v = _at_least_float32(k), _at_least_float32(v)
        with torch.autocast(k.device.type, enabled=False):
            k = self.key_features(k + position)
            if keep is not None:
                k = k * keep[..., None]
            # All heads in one product with a block-diagonal (C, C) matrix: no head is ever laid out by itself. Each of
            # the two products has the multiply-adds of the output projection, h times what separate heads would have.
            heads = self.head_mask.to(v.dtype)
            return torch.cat([(k.transpose(1, 2) @ v) * heads, k.sum(1)[:, :, None] * heads[:, :: self.head_dims]], 2)

    def read(self, q: Tensor, summary: Tensor) -> Tensor:
        """What the queries (B, N, C) get from a summary: the quotient of the sums, (B, N, C)."""
        q = _at_least_float32(q)
        with torch.autocast(q.device.type, enabled=False):
            out, weight_sum = (self.query_features(q) @ summary).split([self.embed_dims, self.num_heads], 2)
            return (out.unflatten(2, (self.num_heads, -1)) / (weight_sum + 1e-6)[..., None]).flatten(2)

    def convolve(self, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """The depthwise 5x5 convolution of values (B, H * W, C) laid out as their map or window."""
        image = v.unflatten(1, hw_shape).permute(0, 3, 1, 2)
        weight = self.dwc.weight.repeat(self.num_heads, 1, 1, 1)
        bias = self.dwc.bias.repeat(self.num_heads)
        return F.conv2d(image, weight, bias, padding=2, groups=self.embed_dims).permute(0, 2, 3, 1).flatten(1, 2)


class SimplifiedFeatures(LinearAttention):
    """ReLU as the feature map (SLAB, Guo et al., ICML 2024, eq. 5-7)."""

    # In place: q is a fresh copy, k a fresh sum, and on a CPU every large new tensor is paged in anew.

    def query_features(self, q: Tensor) -> Tensor:
        return q.relu_()

    def key_features(self, k: Tensor) -> Tensor:
        return k.relu_()


class FocusedFeatures(LinearAttention):
    """``f(x) = |x| x^3 / |x^3|`` of ``(ReLU(x) + 1e-6) / softplus(theta)`` (FLatten, Han et al., ICCV 2023).

    Norms over all C channels. Sums are means over the keys, as in the authors' release since May 2024: finite in
    half precision.
    """

    focusing_factor = 3

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.scale = nn.Parameter(torch.zeros(1, 1, self.embed_dims))

    def query_features(self, q: Tensor) -> Tensor:
        return self.focus((q.relu() + 1e-6) / F.softplus(self.scale))

    def key_features(self, k: Tensor) -> Tensor:
        # The 1 / N of the keys reaches both sums, and turns them into means.
        return self.query_features(k) / k.shape[1]

    def focus(self, x: Tensor) -> Tensor:
        """``|x| x^3 / |x^3|`` over the last dimension: same length, sharper direction."""
        # Cubes of unit vectors: those of x itself leave the range of float32 from 1e6 on.
        length = x.norm(dim=-1, keepdim=True)
        powered = (x / length) ** self.focusing_factor
        return powered * (length / powered.norm(dim=-1, keepdim=True))


def _at_least_float32(x: Tensor) -> Tensor:
    """Raises half precision to float32 and leaves float32 and float64 alone."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
