"""FFN of a deployed backbone: norm, two linear layers and residual, tile by tile."""

from __future__ import annotations

from mmcv.cnn.bricks.transformer import FFN
from torch import Tensor, nn

from slab_det.backbones.ffn import PostActFFN, PreActFFN
from slab_det.backbones.map_ffn import MapFFN, PostActMapFFN, PreActMapFFN
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

    def forward(self, x: Tensor, hw_shape: tuple[int, int] | None = None, identity: Tensor | None = None) -> Tensor:
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
    layers = _two_layers(ffn)
    # An unfused norm in between, or an approximation of the activation, is another function.
    if layers is None or not _is_identity(getattr(ffn, 'norm', None)):
        return None
    fc1, activation, fc2 = layers
    if type(activation) not in ACTIVATIONS or getattr(activation, 'approximate', 'none') != 'none':
        return None
    return DeployedFFN(norm, fc1, ACTIVATIONS[type(activation)], fc2)


def _two_layers(ffn: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module] | None:
    # Exactly these: a subclass may compute something else.
    if (
        type(ffn) in (FFN, PreActFFN, PostActFFN)
        and len(ffn.layers) == 3
        and ffn.add_identity
        and _is_identity(ffn.gamma2)
    ):
        (fc1, activation, _), fc2, _ = ffn.layers
        return fc1, activation, fc2
    if type(ffn) in (MapFFN, PreActMapFFN, PostActMapFFN) and len(ffn.layers) == 5:
        fc1, activation, _, fc2, _ = ffn.layers
        return fc1, activation, fc2
    return None


def _is_identity(module: nn.Module | None) -> bool:
    return module is None or isinstance(module, nn.Identity)
