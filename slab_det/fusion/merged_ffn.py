"""FFNs most of whose hidden channels are replaced by one linear map."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from slab_det.fusion.affine import check_foldable
from slab_det.fusion.folds import CannotFold, find_hooks, find_rule
from slab_det.fusion.fuse import replace_module

# They act on each hidden channel alone, so that channels can be taken out.
ELEMENTWISE = (nn.GELU, nn.ReLU, nn.SiLU, nn.Hardswish)


class MergedFFN(nn.Module):
    """``A x + b + fc2(act(fc1(x)))``: an FFN after :func:`slab_det.absorb` (RePaViT, Xu et al., ICML 2025).

    Args:
        channels: Channels C.
        hidden: Hidden channels K that are left; without any, the FFN is ``A x + b``.
        activation: The activation of the FFN.

    Shape:
        (..., C) -> (..., C), with the residual connection where ``identity`` is given.
    """

    def __init__(self, channels: int, hidden: int, activation: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(channels, channels)
        self.fc1 = nn.Linear(channels, hidden) if hidden else None
        self.activation = activation
        self.fc2 = nn.Linear(hidden, channels, bias=False) if hidden else None

    def forward(self, x: Tensor, hw_shape: tuple[int, int] | None = None, identity: Tensor | None = None) -> Tensor:
        """Takes the arguments of our FFNs, of mmdet's and of timm's. Blocks of timm add the residual themselves."""
        out = self.linear(x)
        if self.fc1 is not None:
            out = out + self.fc2(self.activation(self.fc1(x)))
        return out if identity is None else identity + out

    def input_layers(self) -> tuple[str, ...]:
        """The layers that read the input."""
        return ('linear', 'fc1') if self.fc1 is not None else ('linear',)


def find_ffn_layers(ffn: nn.Module) -> tuple[nn.Module, nn.Module, nn.Module]:
    """fc1, the activation and fc2 of an FFN of two linear layers or 1x1 convolutions.

    Raises:
        CannotFold: If the FFN computes something else; with the reason.
    """
    rule = find_rule(ffn, 'ffn_layers')
    if rule is None:
        raise CannotFold(f'a {type(ffn).__name__} does not say which layers it has')
    fc1, activation, fc2 = map(ffn.get_submodule, rule())
    if type(activation) not in ELEMENTWISE:
        raise CannotFold(f'its activation is a {type(activation).__name__}')
    for layer in (fc1, fc2):
        check_foldable(layer, 'input')
        if isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1):
            raise CannotFold('its convolutions are larger than 1x1')
        if layer.bias is None:
            raise CannotFold('its layers have no bias')
    if any(map(find_hooks, ffn.modules())):
        raise CannotFold('it has hooks, which would be lost')
    return fc1, activation, fc2


@torch.no_grad()
def merge_ffn(model: nn.Module, name: str, hidden: int, channels: Tensor | None = None) -> MergedFFN:
    """Replaces an FFN by a :class:`MergedFFN`: hidden channels are copied from the FFN, ``linear`` is left random.

    Args:
        model: Has the FFN, and is changed.
        name: Dotted name of the FFN.
        hidden: Hidden channels K that are left.
        channels: Their indices, (K,); by default the first K.

    Raises:
        CannotFold: See :func:`find_ffn_layers`.
    """
    fc1, activation, fc2 = find_ffn_layers(model.get_submodule(name))
    weight1, weight2 = fc1.weight.flatten(1), fc2.weight.flatten(1)
    if channels is None:
        channels = torch.arange(hidden, device=weight1.device)
    new = MergedFFN(weight1.shape[1], hidden, activation).to(weight1)
    if hidden:
        new.fc1.weight.copy_(weight1[channels])
        new.fc1.bias.copy_(fc1.bias[channels])
        new.fc2.weight.copy_(weight2[:, channels])
    replace_module(model, name, new.eval())
    return new
