"""Window geometry: which token of a feature map sits in which slot of which window."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

# Added to the logits of pairs that the shift brought together (Swin, Liu et al., ICCV 2021; their value).
MASKED_LOGIT = -100.0


class _SelectRows(torch.autograd.Function):
    """Row selection whose backward is again a selection: every source row is used exactly once.

    The generic backward would be an index_add, slower, and not deterministic on a GPU.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, index: Tensor, inverse: Tensor, unused: Tensor
    ) -> Tensor:
        ctx.save_for_backward(inverse, unused)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        inverse, unused = ctx.saved_tensors
        grad = grad.index_select(0, inverse)
        if unused.numel():
            grad.index_fill_(0, unused, 0)
        return grad, None, None, None


@dataclass(frozen=True, eq=False)
class WindowGeometry:
    """The tokens of one (H, W) map, padded at the bottom right, shifted cyclically and cut into windows.

    Attributes:
        window_size: Side w of a window; N = w * w slots.
        num_windows: nW = ceil(H / w) * ceil(W / w).
        index: The token in each slot, (nW * N,); 0 in slots of padding.
        inverse: The slot of each token, (H * W,).
        padding_slots: The slots that hold padding.
        regions: The region of the shifted map that each slot came from, (nW, N). Attention stays inside one.
    """

    window_size: int
    num_windows: int
    index: Tensor
    inverse: Tensor
    padding_slots: Tensor
    regions: Tensor

    def partition(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Cuts a map into windows.

        Args:
            x: The map, (B, H * W, C).
            padding: What padding slots hold, (C,); None means zero.

        Returns:
            The windows, (B * nW, N, C), contiguous.
        """
        batch, length, channels = x.shape
        index, slots = self._over_batch(self.index, batch, length), self._padding_over_batch(batch)
        rows = self._select(
            x.reshape(batch * length, channels),
            index,
            self._over_batch(self.inverse, batch, self.index.numel()),
            slots[:0],
        )
        if slots.numel():
            if padding is None:
                rows = rows.index_fill_(0, slots, 0)
            else:
                rows = rows.index_copy_(0, slots, padding.to(rows.dtype).expand(slots.numel(), -1))
        return rows.view(batch * self.num_windows, -1, channels)

    def merge(self, windows: Tensor) -> Tensor:
        """Puts windows (B * nW, N, C) back into the map (B, H * W, C); padding slots are dropped."""
        batch, channels = windows.shape[0] // self.num_windows, windows.shape[-1]
        length = self.inverse.numel()
        rows = self._select(
            windows.reshape(-1, channels),
            self._over_batch(self.inverse, batch, self.index.numel()),
            self._over_batch(self.index, batch, length),
            self._padding_over_batch(batch),
        )
        return rows.view(batch, length, channels)

    def attention_mask(self, dtype: torch.dtype) -> Tensor:
        """The additive mask of shifted windows, (nW, N, N): 0 within a region, -100 across."""
        apart = self.regions[:, :, None] != self.regions[:, None, :]
        return apart.to(dtype) * MASKED_LOGIT

    def padding_mask(self) -> Tensor:
        """True in slots that hold padding, (nW, N)."""
        mask = torch.zeros_like(self.index, dtype=torch.bool)
        return mask.index_fill_(0, self.padding_slots, True).view(self.num_windows, -1)

    @staticmethod
    def _over_batch(index: Tensor, batch: int, stride: int) -> Tensor:
        if batch == 1:
            return index
        offsets = torch.arange(batch, device=index.device) * stride
        return (offsets[:, None] + index).flatten()

    def _padding_over_batch(self, batch: int) -> Tensor:
        return self._over_batch(self.padding_slots, batch, self.index.numel())

    @staticmethod
    def _select(rows: Tensor, index: Tensor, inverse: Tensor, unused: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return _SelectRows.apply(rows, index, inverse, unused)
        return rows.index_select(0, index)


@lru_cache(maxsize=64)
def window_geometry(height: int, width: int, window_size: int, shift: int, device: torch.device) -> WindowGeometry:
    """The geometry of a (height, width) map, computed once per size.

    Args:
        height: Rows of the map, in tokens.
        width: Columns of the map, in tokens.
        window_size: Side of a window, in tokens.
        shift: Cyclic shift towards the top left, in tokens, below ``window_size``.
        device: Where the index tensors live.
    """
    # Cached tensors outlive the mode they were made in, and autograd refuses inference tensors.
    with torch.inference_mode(False), torch.no_grad():
        padded_height = -(-height // window_size) * window_size
        padded_width = -(-width // window_size) * window_size
        num_tokens = height * width

        def cut(image: Tensor) -> Tensor:
            rows, columns = padded_height // window_size, padded_width // window_size
            image = image.view(rows, window_size, columns, window_size)
            return image.permute(0, 2, 1, 3).reshape(rows * columns, -1)

        tokens = torch.full((padded_height, padded_width), -1, dtype=torch.long, device=device)
        tokens[:height, :width] = torch.arange(num_tokens, device=device).view(height, width)
        index = cut(tokens.roll((-shift, -shift), (0, 1)).contiguous()).flatten()
        padding = index < 0
        inverse = torch.empty(num_tokens, dtype=torch.long, device=device)
        inverse[index[~padding]] = torch.nonzero(~padding).flatten()

        # Rows and columns of the rolled map fall into three bands each: untouched, kept, wrapped around.
        bands = [torch.arange(n, device=device) for n in (padded_height, padded_width)]
        row_band, column_band = ((i >= i.numel() - window_size).long() + (i >= i.numel() - shift).long() for i in bands)
        regions = cut((row_band[:, None] * 3 + column_band).contiguous())
        return WindowGeometry(
            window_size, regions.shape[0], index.clamp(min=0), inverse, torch.nonzero(padding).flatten(), regions
        )
