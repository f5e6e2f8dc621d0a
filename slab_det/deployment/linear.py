"""Linear layers with what follows them, in one kernel where the machine has one.

On a CPU oneDNN takes the activation or the residual into the matrix product. For float32 it is also the faster product:
the library behind ``F.linear`` picks its kernels by the maker of the processor, oneDNN by its instructions.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from slab_det.fusion.interference import find_hooks
from slab_det.runtime.onednn import linear_add_onednn, linear_onednn, takes_onednn

ACTIVATIONS = {nn.GELU: 'gelu', nn.ReLU: 'relu'}
_FUNCTIONS = {'none': lambda x: x, 'gelu': F.gelu, 'relu': F.relu}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = 'none') -> Tensor:
    """``activation(x weight^T + bias)``.

    Args:
        x: (..., C).
        weight: (C_out, C).
        bias: (C_out,).
        activation: 'none', 'gelu' (the exact one) or 'relu'.
    """
    # oneDNN's ReLU makes 0 of NaN, and a broken checkpoint would look healthy.
    if activation != 'relu' and takes_onednn(x, weight):
        return linear_onednn(x, weight, bias, activation)
    return _FUNCTIONS[activation](F.linear(x, weight, bias))


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """``residual + x weight^T + bias``; arguments as for :func:`linear`, ``residual`` (..., C_out)."""
    if takes_onednn(x, weight):
        return linear_add_onednn(x, weight, bias, residual)
    return F.linear(x, weight, bias).add_(residual)


class DeployedLinear(nn.Linear):
    """A linear layer that computes with :func:`linear`; shares the parameters of ``layer``."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def replace_linears(module: nn.Module) -> None:
    """Replaces every plain ``nn.Linear`` below ``module``, in place."""
    for name, child in module.named_children():
        # Exactly this class, and nothing that computes its weight or watches it: those do something else.
        if type(child) is nn.Linear and 'weight' in child._parameters and not find_hooks(child):
            setattr(module, name, DeployedLinear(child).train(child.training))
        else:
            replace_linears(child)
