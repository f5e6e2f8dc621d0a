"""PRepBN: LayerNorm that training turns into RepBN (SLAB, Guo et al., ICML 2024, eq. 3)."""

from __future__ import annotations

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from slab_det.norms.base import OfflineNorm, read_number
from slab_det.norms.batch_norm import RepBN


@MODELS.register_module()
class PRepBN(OfflineNorm):
    """``gamma * LN(x) + (1 - gamma) * RepBN(x)``: LayerNorm that training turns into RepBN (SLAB, eq. 3).

    :class:`slab_det.hooks.ProgressiveNormHook` lowers gamma from 1, pure LayerNorm, to 0, pure RepBN. Training and
    evaluation use the same mixture. At gamma = 0 the LayerNorm costs nothing and the norm can be folded.
    ``repbn.eval()`` alone freezes the statistics, as ``eval()`` does.

    :class:`RepBN` describes the other arguments.

    Args:
        ln_eps: Added to the variance of the LayerNorm; PVT uses 1e-6. None means ``eps``.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        ln_eps: float | None = None,
        momentum: float = 0.1,
        eta: float = 1.0,
    ) -> None:
        super().__init__(num_features, eps)
        self.ln = nn.LayerNorm(num_features, eps=eps if ln_eps is None else ln_eps)
        self.repbn = RepBN(num_features, eps, momentum, eta)
        # The buffer is for checkpoints and averages; forward reads the float, without a device sync.
        self.register_buffer('_gamma', torch.ones((), dtype=torch.float64))
        self._gamma_value = 1.0

    @property
    def gamma(self) -> float:
        """Share of LayerNorm in the mixture, in [0, 1]. Reads the buffer, which an average may have changed."""
        self.read_numbers()
        return self._gamma_value

    @gamma.setter
    def gamma(self, value: float) -> None:
        if not 0.0 <= value <= 1.0:
            raise ValueError(f'gamma must lie in [0, 1], got {value}')
        self._gamma_value = float(value)
        self._gamma.fill_(self._gamma_value)

    def read_numbers(self) -> None:
        self._gamma_value = read_number(self._gamma, self._gamma_value)

    @property
    def calibrating(self) -> bool:
        return self.repbn.calibrating

    @calibrating.setter
    def calibrating(self, value: bool) -> None:
        self.repbn.calibrating = value

    def forward(self, x: Tensor) -> Tensor:
        # The same in training and evaluation: the RepBN chooses between batch and running statistics.
        if self._gamma_value > 0.0:
            return self._train(x)
        if torch.is_grad_enabled():
            x = _KeepInGraph.apply(x, *self.ln.parameters())
        return self.repbn(x)

    def train_forward(self, x: Tensor) -> Tensor:
        """The mixture of eq. 3 at the current gamma."""
        self.check_channels(x)
        # LayerNorm first: the sum inherits the memory layout of LayerNorm's output, in which later layers are fast.
        return torch.add(self._gamma_value * self.ln(x), self.repbn(x), alpha=1.0 - self._gamma_value)

    def inference_affine(self) -> tuple[Tensor, Tensor]:
        """The affine of the RepBN; ValueError while gamma > 0, because LayerNorm is not affine in its input."""
        if self.gamma > 0.0:
            raise ValueError(f'PRepBN at gamma = {self.gamma:g} still contains LayerNorm and is not affine')
        return self.repbn.inference_affine()

    def statistics(self) -> tuple[Tensor, Tensor]:
        return self.repbn.statistics()

    def set_statistics(self, mean: Tensor, var: Tensor) -> None:
        self.repbn.set_statistics(mean, var)

    def _apply(self, *args) -> PRepBN:
        self.read_numbers()
        super()._apply(*args)
        # Always float64, so that a checkpoint holds the value that forward uses.
        self._gamma = torch.full_like(self._gamma, self._gamma_value, dtype=torch.float64)
        return self

    def extra_repr(self) -> str:
        return f'{super().extra_repr()}, gamma={self._gamma_value:g}'


class _KeepInGraph(torch.autograd.Function):
    """Returns ``x`` and adds ``parameters`` to the autograd graph, without giving them a gradient.

    At gamma = 0 forward does not read the LayerNorm's parameters, but DistributedDataParallel waits for all parameters.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.num_parameters = len(parameters)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad, *[None] * ctx.num_parameters)


def named_progressive_norms(model: nn.Module) -> dict[str, PRepBN]:
    """Every PRepBN of ``model`` by its dotted name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PRepBN)}


def set_gamma(model: nn.Module, value: float) -> int:
    """Sets gamma, the share of LayerNorm in [0, 1], of every PRepBN in ``model``; returns the number of norms."""
    norms = named_progressive_norms(model)
    for norm in norms.values():
        norm.gamma = value
    return len(norms)
