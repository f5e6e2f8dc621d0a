"""What every attention has: heads, and the mathematics that mixes tokens."""

from __future__ import annotations

from abc import abstractmethod

from mmengine.model import BaseModule
from torch import Tensor

from slab_det.attention.geometry import Geometry


class Attention(BaseModule):
    """Mathematics over a geometry. Subclasses write :meth:`mix`; training, deployment and export all call it.

    Args:
        embed_dims: Channels C.
        num_heads: Heads h; each has d = C / h channels.
        qk_scale: Factor of the logits; None means 1 / sqrt(d).
        attn_drop_rate: Dropout on attention weights, where an attention has weights.

    Raises:
        ValueError: If ``num_heads`` does not divide ``embed_dims``.
    """

    # Whether mix() gets every head by itself, (B, h, N, d), or all of them together, (B, 1, N, C).
    heads_apart = True

    def __init__(
        self, embed_dims: int, num_heads: int, qk_scale: float | None = None, attn_drop_rate: float = 0.0
    ) -> None:
        super().__init__()
        if embed_dims % num_heads:
            raise ValueError(f'num_heads={num_heads} does not divide embed_dims={embed_dims}')
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.head_dims = embed_dims // num_heads
        self.qk_scale = qk_scale or self.head_dims**-0.5
        self.attn_drop_rate = attn_drop_rate

    @property
    def groups(self) -> int:
        """Groups of channels that :meth:`mix` gets apart."""
        return self.num_heads if self.heads_apart else 1

    @abstractmethod
    def mix(self, q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> Tensor:
        """Mixes the values for every query.

        Args:
            q: Queries (B, h, N, d) of B windows or maps, views that may be overwritten where no gradient is needed.
            k: Keys (B, h, M, d).
            v: Values (B, h, M, d).
            geometry: Where the tokens lie.

        Returns:
            (B, h, N, d), before the output projection.
        """
