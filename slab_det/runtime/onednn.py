"""The operators of oneDNN that PyTorch's own compiler calls; they have no public name."""

from __future__ import annotations

import torch
from torch import Tensor

_AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, '_linear_pointwise')
_DTYPES = {torch.float32: _AVAILABLE, torch.bfloat16: _AVAILABLE and torch.ops.mkldnn._is_mkldnn_bf16_supported()}


def takes_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether the operators here take ``x`` and ``weight``."""
    # Autograd has no formula for them, autocast does not know them, and a compiler or an export wants standard ones.
    return (
        x.device.type == 'cpu'
        and x.dtype == weight.dtype
        and _DTYPES.get(x.dtype, False)
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
        and not torch.is_autocast_enabled('cpu')
        and getattr(torch.backends.mkldnn, 'enabled', True)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
    )


def linear_onednn(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """``activation(x weight^T + bias)``; ``activation`` is 'none' or 'gelu'."""
    # The last argument is the formula of GELU: by erf, not by tanh.
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, activation, [], 'none')


def linear_add_onednn(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """``residual + x weight^T + bias``."""
    return torch.ops.mkldnn._linear_pointwise.binary(x, residual, weight, bias, 'add')
