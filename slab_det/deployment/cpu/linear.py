"""Linear layers on oneDNN, with the activation or the residual in the same kernel, on CPUs where that is faster.

The library behind ``F.linear`` chooses kernels by CPU vendor, oneDNN by instruction set. On AMD CPUs with AVX-512,
oneDNN multiplies float32 at one to two times the speed of ``F.linear``; with AVX2 it is slower than ``F.linear``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slab_det.deployment.replacements import is_plain_linear

_FUNCTIONS = {'none': lambda x: x, 'gelu': F.gelu, 'relu': F.relu}


def _onednn_dtypes() -> tuple[torch.dtype, ...]:
    """The dtypes that oneDNN multiplies faster than ``F.linear`` on this machine."""
    is_fast = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == 'AVX512'
    # Internal operators, which another PyTorch may lack; tests/test_private_torch.py runs them.
    if not is_fast or not hasattr(torch.ops.mkldnn, '_linear_pointwise'):
        return ()
    takes_bfloat16 = getattr(torch.ops.mkldnn, '_is_mkldnn_bf16_supported', lambda: False)
    return (torch.float32, torch.bfloat16) if takes_bfloat16() else (torch.float32,)


ONEDNN_DTYPES = _onednn_dtypes()


def takes_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether :func:`linear` uses oneDNN for ``x`` and ``weight``."""
    # torch.ops.mkldnn is internal to PyTorch's compiler; autocast and torch.compile do not support its operators.
    needs_public_ops = torch.is_autocast_enabled('cpu') or torch.compiler.is_compiling()
    return x.device.type == 'cpu' and x.dtype == weight.dtype and x.dtype in ONEDNN_DTYPES and not needs_public_ops


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = 'none') -> Tensor:
    """``activation(x weight^T + bias)`` for x (..., C), weight (C_out, C); 'none', 'gelu' (exact) or 'relu'."""
    # oneDNN's ReLU turns NaN into 0, which would hide a broken checkpoint.
    if activation != 'relu' and takes_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], 'none')
    return _FUNCTIONS[activation](F.linear(x, weight, bias))


def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """``residual + x weight^T + bias``; arguments as for :func:`linear`, ``residual`` (..., C_out)."""
    if takes_onednn(x, weight):
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, 'add')
    return F.linear(x, weight, bias).add_(residual)


class DeployedLinear(nn.Linear):
    """A linear layer that computes with :func:`linear`; shares the parameters of ``layer``."""

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def deployed_linear(layer: nn.Module) -> DeployedLinear | None:
    """The deployed form of a plain linear layer; None for every other layer."""
    return DeployedLinear(layer) if is_plain_linear(layer) else None
