"""The norms that UN is compared with: MABN (Yan et al., ICLR 2020) and PowerNorm (Shen et al., ICML 2020)."""

from __future__ import annotations

import torch
from mmengine.registry import MODELS
from torch import Tensor

from slab_det.norms.quadratic import QuadraticNorm
from slab_det.norms.recent_values import RecentValues


class _ExponentialSquareNorm(QuadraticNorm):
    """Divides by the exponential moving average of mean x^2, the current batch included."""

    def smooth_square(self, square: Tensor, is_finite: Tensor) -> tuple[Tensor, None]:
        # The average begins with the warm-up, not after it: by then it has forgotten its initial value.
        self.running_var.lerp_(square.to(self.running_var.dtype), self.momentum)
        return torch.where(self.is_warming_up, square, self.running_var), None


@MODELS.register_module()
class MABN(_ExponentialSquareNorm):
    """Moving Average BatchNorm as UN compares with it: no mean, exponential average forward, simple one backward.

    s^ <- a s^ + (1 - a) mean x^2, a = 1 - momentum; psi is the mean of the last M values of gs. Without the paper's
    centralized weights, and without the released code's factor r between batch and running statistics.

    Args:
        num_features: Channels C.
        eps: Added to s^ inside the root.
        momentum: Weight of the new value in s^; the released code has 0.02.
        window_size: Values M of the backward average; 16 in the released code for detectors.
        warmup_iters: So many iterations normalise by the batch alone.
        sync: Pool the tokens of all processes, each with the same weight; otherwise each process has its own averages.

    Shape:
        (..., C) -> (..., C), channels last; a single token will do.

    Raises:
        ValueError: If the last dimension is not ``num_features``, or ``window_size`` is below 1.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        window_size: int = 16,
        warmup_iters: int = 100,
        sync: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, warmup_iters, sync)
        self.window_size = window_size
        self.gradients = RecentValues(window_size, num_features)

    def smooth_gradient(self, gradient: Tensor, is_outlier: Tensor | None, is_finite: Tensor) -> Tensor:
        self.gradients.push(gradient, is_finite)
        return self.psi.copy_(torch.where(is_finite, self.gradients.mean(), self.psi))

    def extra_repr(self) -> str:
        return f'{super().extra_repr()}, window_size={self.window_size}'


@MODELS.register_module()
class PowerNorm(_ExponentialSquareNorm):
    """PowerNorm that stays offline: no mean, exponential averages forward and backward.

    s^ <- a s^ + (1 - a) mean x^2 and psi <- a psi + (1 - a) gs, a = 1 - momentum. The paper's scaling of each token by
    its own quadratic mean is left out, as in UN's comparison: at inference it would still need every token.

    Args:
        num_features: Channels C.
        eps: Added to s^ inside the root.
        momentum: Weight of the new value in both averages.
        warmup_iters: So many iterations normalise by the batch alone.
        sync: Pool the tokens of all processes, each with the same weight; otherwise each process has its own averages.

    Shape:
        (..., C) -> (..., C), channels last; a single token will do.

    Raises:
        ValueError: If the last dimension is not ``num_features``.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, warmup_iters: int = 10000, sync: bool = True
    ) -> None:
        super().__init__(num_features, eps, momentum, warmup_iters, sync)

    def smooth_gradient(self, gradient: Tensor, is_outlier: Tensor | None, is_finite: Tensor) -> Tensor:
        return self.psi.lerp_(gradient.to(self.psi.dtype), self.momentum)
