"""Linear attention, for windows and for whole maps: simplified (SLAB, eq. 5-7) and focused (FLatten)."""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slab_det.attention.base import Attention, MapAttention, WindowAttention
from slab_det.attention.geometry import Geometry


class LinearMixing(Attention):
    """Linear attention plus a depthwise convolution of the values; a mixin for WindowAttention and MapAttention.

    ``O_i = f(q_i) (sum_j f(k_j + P_j)^T v_j) / (f(q_i) sum_j f(k_j + P_j) + 1e-6) + DWC(v)_i`` per head, linear in
    the number of tokens. Subclasses give the feature map f. P, added to the keys, is a learned positional encoding.
    Over maps P is interpolated from its size in pretraining. Values of a reduced map are interpolated to the size of
    the queries' map before the convolution.

    As in the released code there is no shift mask: a shifted window sums over all its tokens, padding included.
    """

    splits_heads = False

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        height, width = self.table_shape
        if min(height, width) < 1:
            raise ValueError(
                'linear attention has no position for any key: pretrain_img_size is too small for the strides and '
                'la_sr_ratios'
            )
        self.positional_encoding = nn.Parameter(torch.zeros(1, height * width, self.embed_dims))
        self.register_buffer(
            'head_mask',
            torch.block_diag(*[torch.ones(self.head_dims, self.head_dims)] * self.num_heads),
            persistent=False,
        )
        # One kernel for all heads.
        self.dwc = nn.Conv2d(self.head_dims, self.head_dims, 5, padding=2, groups=self.head_dims)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> Tensor:
        q, k, v = q.squeeze(1), k.squeeze(1), v.squeeze(1)
        local = self.convolve(geometry.values_at_queries(v), geometry.query_shape)
        return local.add_(self.average(q, k, v, geometry).to(local.dtype)).unsqueeze(1)

    @abstractmethod
    def query_features(self, q: Tensor) -> Tensor:
        """f(q), non-negative, (B, N, C); may write into q."""

    @abstractmethod
    def key_features(self, k: Tensor) -> Tensor:
        """f(k), non-negative, (B, M, C); may write into k."""

    def average(self, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> Tensor:
        """The weighted average of the values for each query, (B, N, C): the quotient in the formula."""
        # Half precision cannot hold sums over thousands of tokens.
        if k.dtype.itemsize < 4:
            q, k, v = q.float(), k.float(), v.float()
        with torch.autocast(k.device.type, enabled=False):
            k = self.key_features(k + geometry.fit_table(self.positional_encoding, self.table_shape))
            # One matrix product for all heads; head_mask keeps the diagonal blocks. The product has h times the
            # multiply-adds, and still takes less time than a copy of each head.
            heads = self.head_mask.to(v.dtype)
            sums = [(k.transpose(1, 2) @ v) * heads, k.sum(1)[:, :, None] * heads[:, :: self.head_dims]]
            out, weight_sum = (self.query_features(q) @ torch.cat(sums, 2)).split([self.embed_dims, self.num_heads], 2)
            return (out.unflatten(2, (self.num_heads, -1)) / (weight_sum + 1e-6)[..., None]).flatten(2)

    def convolve(self, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """The depthwise 5x5 convolution of values (B, H * W, C) laid out as their map or window."""
        image = v.unflatten(1, hw_shape).permute(0, 3, 1, 2)
        weight = self.dwc.weight.repeat(self.num_heads, 1, 1, 1)
        bias = self.dwc.bias.repeat(self.num_heads)
        return F.conv2d(image, weight, bias, padding=2, groups=self.embed_dims).permute(0, 2, 3, 1).flatten(1, 2)


class SimplifiedMixing(LinearMixing):
    """ReLU as the feature map (SLAB, Guo et al., ICML 2024, eq. 5-7)."""

    # In place where autograd allows it: allocating another large tensor takes long on a CPU.

    def query_features(self, q: Tensor) -> Tensor:
        return F.relu(q, inplace=not torch.is_grad_enabled())

    def key_features(self, k: Tensor) -> Tensor:
        return k.relu_()


class FocusedMixing(LinearMixing):
    """``f(x) = |z| z^3 / |z^3|`` with ``z = (ReLU(x) + 1e-6) / softplus(theta)`` (FLatten, Han et al., ICCV 2023).

    |.| is the norm over all C channels. Both sums over the keys are means, as in the authors' code since May 2024.
    """

    focusing_factor = 3

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.scale = nn.Parameter(torch.zeros(1, 1, self.embed_dims))

    def query_features(self, q: Tensor) -> Tensor:
        x = (q.relu() + 1e-6) / F.softplus(self.scale)
        # Cubes the unit vector, because the norm of x^3 overflows float32 for x above 1e6.
        length = x.norm(dim=-1, keepdim=True)
        powered = (x / length) ** self.focusing_factor
        return powered * (length / powered.norm(dim=-1, keepdim=True))

    def key_features(self, k: Tensor) -> Tensor:
        # 1 / N turns both sums over the keys into means.
        return self.query_features(k) / k.shape[1]


class SimplifiedWindowAttention(SimplifiedMixing, WindowAttention):
    """Simplified linear attention in windows."""


class FocusedWindowAttention(FocusedMixing, WindowAttention):
    """Focused linear attention in windows."""


class SimplifiedMapAttention(SimplifiedMixing, MapAttention):
    """Simplified linear attention over a map."""


class FocusedMapAttention(FocusedMixing, MapAttention):
    """Focused linear attention over a map."""
