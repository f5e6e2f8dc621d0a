"""Winograd's 3x3 convolution in float32 on a CPU, with a quarter of the multiplications."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# B^T, G and A^T of Winograd's F(4x4, 3x3), by the points 0, 1, -1, 2, -2 and infinity (Lavin and Gray).
OUT, IN = 4, 6
_INPUT = (
    (4, 0, -5, 0, 1, 0),
    (0, -4, -4, 1, 1, 0),
    (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0),
    (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)
_FILTER = (
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
_OUTPUT = ((1, 1, 1, 1, 1, 0), (0, 1, -1, 2, -2, 0), (0, 1, 1, 4, 4, 0), (0, 1, -1, 8, -8, 1))
# Tiles in one step: few enough to stay in the cache through the transforms and the product.
CHUNK_TILES = 512
# With fewer channels, the transforms cost as much time as the products save.
MIN_CHANNELS = 128


class WinogradConv(nn.Module):
    """A 3x3 convolution of stride 1 by minimal filtering (Lavin and Gray, CVPR 2016).

    A tile of 4x4 outputs reads 6x6 inputs d. With the filter g it is::

        A^T [(G g G^T) * (B^T d B)] A

    where each of the 36 products is a sum over the input channels.

    Args:
        conv: The convolution to deploy, with a padding of 1.

    Shape:
        (N, C, H, W) -> (N, C_out, H, W), channels last.
    """

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        to_filter = torch.tensor(_FILTER, dtype=torch.float64)
        weight = torch.einsum('ia,kcab,jb->ijck', to_filter, conv.weight.double(), to_filter).flatten(0, 1)
        self.weight = nn.Parameter(weight.to(conv.weight.dtype).contiguous(), requires_grad=False)
        self.bias = conv.bias
        for name, matrix in (('to_input', _INPUT), ('to_output', _OUTPUT)):
            matrix = torch.tensor(matrix, dtype=conv.weight.dtype)
            self.register_buffer(name, torch.kron(matrix, matrix), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        # In half precision, the transforms would lose most digits: their terms are large and cancel.
        with torch.autocast('cpu', enabled=False):
            return self._forward(x.to(self.weight.dtype))

    def _forward(self, x: Tensor) -> Tensor:
        images, _, height, width = x.shape
        tiles_y, tiles_x = -(-height // OUT), -(-width // OUT)
        step_y, step_n = max(1, CHUNK_TILES // tiles_x), max(1, CHUNK_TILES // (tiles_y * tiles_x))
        output = x.new_empty(images, tiles_y, OUT, tiles_x, OUT, self.weight.shape[-1])
        x = x.permute(0, 2, 3, 1)
        for n in range(0, images, step_n):
            for y in range(0, tiles_y, step_y):
                # The rows that these tiles read begin one above their first output.
                start, stop = y * OUT - 1, min(y + step_y, tiles_y) * OUT + 1
                rows = x[n : n + step_n, max(start, 0) : stop]
                top, right = max(-start, 0), tiles_x * OUT - width + 1
                padded = F.pad(rows, (0, 0, 1, right, top, stop - start - top - rows.shape[1]))
                output[n : n + step_n, y : y + step_y] = self._convolve(padded)
        output = output.view(images, tiles_y * OUT, tiles_x * OUT, -1)[:, :height, :width]
        return output.permute(0, 3, 1, 2)

    def _convolve(self, x: Tensor) -> Tensor:
        """The outputs (n, y, 4, x, 4, C_out) of y * x tiles, from padded rows (n, 4 y + 2, 4 x + 2, C)."""
        tiles = x.unfold(1, IN, OUT).unfold(2, IN, OUT).permute(4, 5, 0, 1, 2, 3)
        transformed = (self.to_input @ tiles.reshape(IN * IN, -1)).view(IN * IN, -1, x.shape[-1])
        products = torch.bmm(transformed, self.weight)
        output = (self.to_output @ products.view(IN * IN, -1)).view(OUT, OUT, *tiles.shape[2:5], -1)
        if self.bias is not None:
            output += self.bias
        return output.permute(2, 3, 0, 4, 1, 5)


def winograd_conv(layer: nn.Module) -> nn.Module | None:
    """The :class:`WinogradConv` of a layer; None if the layer computes something else or has few channels."""
    # Exactly this class: a subclass may compute its weight.
    if type(layer) is not nn.Conv2d or layer.padding_mode != 'zeros' or layer.groups > 1:
        return None
    shape = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    is_small = min(layer.in_channels, layer.out_channels) < MIN_CHANNELS
    return WinogradConv(layer) if shape == ((3, 3), (1, 1), (1, 1), (1, 1)) and not is_small else None
