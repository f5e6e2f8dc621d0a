"""Unified Normalization (UN, Yang et al., ACM MM 2022)."""

from __future__ import annotations

import torch
from mmengine.registry import MODELS
from torch import Tensor

from slab_det.norms.quadratic import QuadraticNorm
from slab_det.norms.recent_values import RecentValues


@MODELS.register_module()
class UN(QuadraticNorm):
    """Divides by the geometric mean of the last M quadratic means, unless the window holds an outlier.

    In iteration t, with s_t = mean x^2 over all tokens, per channel:
    s^ is the geometric mean of the last M values of s, s_t among them, and the running variance averages s^;
    in the backward pass psi <- a psi + (1 - a) mean of the last M values of gs, a = 1 - momentum. Until M values have
    been seen the means are over those that have. During the warm-up s^ = s_t; the window fills meanwhile. The
    geometric mean takes no s below eps / 1000, which beside eps in the root is nothing.

    Outlier filtration: where the arithmetic mean of the window exceeds the geometric one by more than M V in any
    channel, the whole layer takes s^ = s_t and psi = gs_t for this iteration, and the windows get the running averages
    from before the iteration in place of s_t and gs_t; the running averages themselves take s_t and gs_t. V is one
    number for the layer: the unbiased variance of the square roots of all M C values in the window before s_t came.
    The filter is silent during the warm-up and until that window is full.

    Two things of the released code are not in the paper's formulas and not here: the factor r between batch and running
    statistics in the gradient, and backward averages that also wait for the end of the warm-up.

    torch.compile cannot take the training forward into a graph, see :class:`QuadraticNorm`.

    Args:
        num_features: Channels C.
        eps: Added to s^ inside the root.
        momentum: Weight of the new value in running averages, 1 - a in the paper.
        window_size: Values M of the moving means, forward and backward.
        warmup_iters: So many iterations normalise by the batch alone.
        filter_outliers: Use outlier filtration. The paper does for vision; without it its detectors did not train.
        sync: Pool the tokens of all processes, each with the same weight; otherwise each process has its own averages.

    Shape:
        (..., C) -> (..., C), channels last; a single token will do.

    Raises:
        ValueError: If the last dimension is not ``num_features``, or ``window_size`` is below 1.

    Attributes:
        num_filtered: Iterations in which the filter fired.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        window_size: int = 4,
        warmup_iters: int = 4000,
        filter_outliers: bool = True,
        sync: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, warmup_iters, sync)
        self.window_size = window_size
        self.filter_outliers = filter_outliers
        self.squares = RecentValues(window_size, num_features)
        self.gradients = RecentValues(window_size, num_features)
        self.register_buffer('num_filtered', torch.zeros((), dtype=torch.int64))

    def smooth_square(self, square: Tensor, is_finite: Tensor) -> tuple[Tensor, Tensor | None]:
        window, is_outlier = self.squares, None
        # One value is its own mean of either kind, whatever rounding says.
        can_fire = self.filter_outliers and self.window_size > 1
        if can_fire:
            is_armed = window.is_full & ~self.is_warming_up & is_finite
            limit = self.window_size * window.values.sqrt().var()
        window.push(square, is_finite)
        # A batch of zeros has no logarithm, and must not blow up the next M - 1 batches.
        geometric_mean = window.mean(window.values.clamp(min=1e-3 * self.eps).log()).exp()
        use_batch = self.is_warming_up | ~is_finite
        if can_fire:
            is_outlier = is_armed & (window.mean() - geometric_mean > limit).any()
            window.replace_latest(torch.where(is_outlier, self.running_var, square), is_finite)
            self.num_filtered += is_outlier
            use_batch = use_batch | is_outlier
        smoothed = torch.where(use_batch, square, geometric_mean)
        self.running_var.lerp_(smoothed.to(self.running_var.dtype), self.momentum)
        return smoothed, is_outlier

    def smooth_gradient(self, gradient: Tensor, is_outlier: Tensor | None, is_finite: Tensor) -> Tensor:
        if is_outlier is None:
            is_outlier = torch.zeros_like(self.iteration, dtype=torch.bool)
        self.gradients.push(torch.where(is_outlier, self.psi, gradient), is_finite)
        latest = torch.where(is_outlier | ~is_finite, gradient, self.gradients.mean())
        self.psi.lerp_(latest.to(self.psi.dtype), self.momentum)
        return torch.where(is_outlier, gradient, self.psi)

    def extra_repr(self) -> str:
        return f'{super().extra_repr()}, window_size={self.window_size}, filter_outliers={self.filter_outliers}'
