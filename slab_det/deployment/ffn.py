"""FFN of a deployed backbone: norm, two linear layers and residual, tile by tile."""

from __future__ import annotations

from torch import Tensor, nn

from slab_det.backbones.blocks import ConvFFN, LinearFFN
from slab_det.deployment.linear import ACTIVATIONS, linear, linear_add
from slab_det.deployment.tiles import row_tiles, tile_tokens


class DeployedFFN(nn.Module):
    """``x + fc2(act(fc1(norm(x))))``, written into x.

    Args:
        norm: The norm before the FFN; an identity once it is fused.
        fc1: First layer, linear or a 1x1 convolution; its parameters are shared.
        activation: 'gelu' or 'relu'.
        fc2: Second layer.

    Shape:
        (B, L, C), contiguous; changed in place and returned.
    """

    def __init__(self, norm: nn.Module, fc1: nn.Module, activation: str, fc2: nn.Module) -> None:
        super().__init__()
        self.norm, self.fc1, self.activation, self.fc2 = norm, fc1, activation, fc2

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor) -> Tensor:
        tokens = x.view(-1, x.shape[-1])
        # A 1x1 convolution's weight has two more dimensions.
        weight1, weight2 = self.fc1.weight.flatten(1), self.fc2.weight.flatten(1)
        for rows in row_tiles(tokens.shape[0], tile_tokens(x.device)):
            tile = tokens[rows]
            hidden = linear(self.norm(tile), weight1, self.fc1.bias, self.activation)
            tile.copy_(linear_add(hidden, weight2, self.fc2.bias, tile))
        return x


def deploy_ffn(norm: nn.Module, ffn: nn.Module) -> DeployedFFN | None:
    """The deployed form of a norm and the FFN behind it; None for an FFN of another kind."""
    # Exactly these: a subclass may compute something else. A depthwise convolution, an unfused norm in between or an
    # approximation of the activation is another function too.
    if type(ffn) not in (LinearFFN, ConvFFN) or not isinstance(ffn.norm, nn.Identity):
        return None
    fc1, activation, fc2 = map(ffn.get_submodule, (ffn.fc1, ffn.activation, ffn.fc2))
    if type(activation) not in ACTIVATIONS or getattr(activation, 'approximate', 'none') != 'none':
        return None
    return DeployedFFN(norm, fc1, ACTIVATIONS[type(activation)], fc2)
