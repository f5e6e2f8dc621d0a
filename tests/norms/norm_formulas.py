"""Norms with random parameters, and the papers' formulas that they are compared with."""

import torch
from torch import nn

import slab_det
from slab_det.norms import MABN, UN, PowerNorm, PRepBN, RepBN, TokenBN

C = 5
QUADRATIC = [UN, MABN, PowerNorm]
NORMS = [TokenBN, RepBN, PRepBN, *QUADRATIC]


def make_norm(kind: type, gamma: float = 0.0, **options) -> nn.Module:
    """A norm in float64 with random parameters and statistics. Only PRepBN has a gamma."""
    norm = kind(C, **options).double()
    with torch.no_grad():
        for name, tensor in norm.state_dict().items():
            if name.rpartition('.')[2] in ('weight', 'bias', 'eta', 'running_mean', 'running_var'):
                tensor.copy_(torch.rand_like(tensor) + 0.5)
    slab_det.set_gamma(norm, gamma)
    return norm


def tokens(*shape: int, requires_grad: bool = False) -> torch.Tensor:
    return (3 * torch.randn(*(shape or (2, 7)), C, dtype=torch.double) + 1).requires_grad_(requires_grad)


def copy_parameters(norm: nn.Module) -> dict[str, torch.Tensor]:
    """Copies in float64 of the parameters of a norm, by name."""
    return {name: value.detach().double().clone().requires_grad_() for name, value in norm.named_parameters()}


def formula(norm: nn.Module, parameters: dict, x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    """The output of a norm for tokens x, given statistics and parameters; for PRepBN eq. 3 of SLAB."""
    p = {name.removeprefix('repbn.'): value for name, value in parameters.items()}
    if type(norm) in QUADRATIC:
        mean, var = 0, var + mean.square()
    y = p['weight'] * (x - mean) / (var + norm.eps).sqrt() + p['bias'] + p.get('eta', 0) * x
    gamma = getattr(norm, 'gamma', 0.0)
    if gamma == 0:
        return y
    ln = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + norm.ln.eps).sqrt()
    return gamma * (ln * p['ln.weight'] + p['ln.bias']) + (1 - gamma) * y
