"""Norms without mean: UN (Yang et al., MM 2022), MABN (Yan et al., ICLR 2020), PowerNorm (Shen et al., ICML 2020)."""

from __future__ import annotations

from abc import abstractmethod

import torch
from mmengine.dist import all_reduce, get_world_size
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from slab_det.norms.base import OfflineNorm, at_least_float32, is_recomputing, read_number


class QuadraticNorm(OfflineNorm):
    """``y = weight z + bias``, ``z = x / sqrt(s^ + eps)``: a norm without mean, s^ a moving average of mean x^2.

    Means are per channel, over the tokens of all processes. The backward pass does not differentiate s^. It subtracts
    a moving average psi of ``gs = mean(g z)`` instead, with ``g = weight dy``: ``dx = (g - z psi) / sqrt(s^ + eps)``.
    Subclasses choose the averages; buffers hold them, so that a resumed run continues exactly. Where mean x^2 or gs of
    a channel is not finite, the running average replaces it: a NaN would stay in the averages forever.

    With activation checkpointing, call backward after each forward: a norm keeps s^ of its last forward only.

    Args:
        eps: Added to s^ inside the root.
        momentum: Weight of the new value in running averages, 1 - a in the papers.
        warmup_iters: Iterations in which s^ is the batch's own mean x^2. The averages of the backward pass run from
            the first iteration on.

    Shape:
        (..., C) -> (..., C), channels last; a single token suffices.

    Attributes:
        running_var: Running average of mean x^2, (C,). Inference divides by its root.
        psi: Latest average of gs, (C,).
        iteration: Training iterations t so far, 0-d.
    """

    def __init__(self, num_features: int, eps: float, momentum: float, warmup_iters: int) -> None:
        super().__init__(num_features, eps)
        self.momentum = momentum
        self.warmup_iters = warmup_iters
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer('running_var', torch.ones(num_features))
        self.register_buffer('psi', torch.zeros(num_features))
        self.register_buffer('iteration', torch.zeros((), dtype=torch.int64))
        # A copy of `iteration` as a Python number, see read_numbers().
        self._iteration = 0
        # The result of smooth_square() in the last forward; a recomputed forward uses it again.
        self.last_square: tuple[Tensor, Tensor | None] | None = None

    def smooth_square(self, square: Tensor) -> tuple[Tensor, Tensor | None]:
        """Updates the forward averages with mean x^2 of an iteration, (C,). This base class averages exponentially.

        Returns:
            s^, (C,), and a 0-d flag, whether the batch is an outlier; None instead of the flag without a filter.
        """
        # The average begins with the warm-up, not after it: by then it has forgotten its initial value.
        self.running_var.lerp_(square, self.momentum)
        return square if self._iteration <= self.warmup_iters else self.running_var, None

    @abstractmethod
    def smooth_gradient(self, gradient: Tensor, is_outlier: Tensor | None) -> Tensor:
        """Updates the backward averages with gs of an iteration, (C,).

        Args:
            gradient: gs.
            is_outlier: The flag that :meth:`smooth_square` returned in the same iteration.

        Returns:
            psi of this iteration, (C,).
        """

    def read_numbers(self) -> None:
        self._iteration = read_number(self.iteration, self._iteration)
        for window in self.children():
            window.read_numbers()

    def train_forward(self, x: Tensor) -> Tensor:
        if not self.calibrating:
            return _QuadraticNormStep.apply(x, self.weight, self.bias, self)
        values = at_least_float32(x)
        square = _sum_over_tokens(values.square()) / x.shape[:-1].numel()
        return torch.addcmul(self.bias, values, self.weight * (square + self.eps).rsqrt()).to(x.dtype)

    @torch.no_grad()
    def reset_state(self) -> None:
        """Sets counters, windows and psi to zero, as for fine-tuning; keeps the running variance."""
        for name, buffer in self.named_buffers():
            if name != 'running_var':
                buffer.zero_()
        self.read_numbers()

    def inference_affine(self) -> tuple[Tensor, Tensor]:
        return self.weight / (self.running_var + self.eps).sqrt(), self.bias

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Zeros, because no mean is subtracted, and the running average of mean x^2."""
        return torch.zeros_like(self.running_var), self.running_var

    @torch.no_grad()
    def set_statistics(self, mean: Tensor, var: Tensor) -> None:
        self.running_var.copy_(var + mean.square())

    def extra_repr(self) -> str:
        return f'{super().extra_repr()}, momentum={self.momentum}, warmup_iters={self.warmup_iters}'


class _QuadraticNormStep(torch.autograd.Function):
    """One training iteration of a QuadraticNorm. Saves x and vectors (C,); backward recomputes z."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor, norm: QuadraticNorm) -> Tensor:
        # x^2 overflows float16 from 256 on.
        values = at_least_float32(x)
        if not is_recomputing():
            norm.iteration += 1
            norm._iteration += 1
            square = _mean_over_processes(_sum_over_tokens(values * values), x, norm.running_var)
            norm.last_square = norm.smooth_square(square)
        smoothed, is_outlier = norm.last_square
        inverse_root = (smoothed + norm.eps).rsqrt()
        scale = weight * inverse_root
        ctx.norm = norm
        # Saved, because another forward may replace norm.last_square before this backward.
        ctx.save_for_backward(x, weight, inverse_root, scale, is_outlier)
        return torch.addcmul(bias, values, scale).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse_root, scale, is_outlier = ctx.saved_tensors
        grad = at_least_float32(grad)
        grad_weight = _sum_over_tokens(grad * x) * inverse_root
        gradient = _mean_over_processes(weight * grad_weight, x, ctx.norm.psi)
        psi = ctx.norm.smooth_gradient(gradient, is_outlier)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad * scale).addcmul_(x, psi * inverse_root * inverse_root, value=-1).to(x.dtype)
        return grad_x, grad_weight.to(weight.dtype), _sum_over_tokens(grad).to(weight.dtype), None


def _sum_over_tokens(x: Tensor) -> Tensor:
    """Sums (..., C) to (C,), without the copy that flattening a transposed map would make."""
    return x.sum_to_size(x.shape[-1])


def _mean_over_processes(own: Tensor, x: Tensor, average: Tensor) -> Tensor:
    """The mean over the tokens of all processes; where it is not finite, ``average``.

    Args:
        own: The sum over the tokens of this process, (C,).
        x: The tokens of this process, (..., C).
        average: The running average, (C,).
    """
    count = x.shape[:-1].numel()
    if get_world_size() == 1:
        mean = own / count
    else:
        total = torch.cat([own, own.new_full((1,), count)])
        all_reduce(total)
        mean = total[:-1] / total[-1]
    return torch.where(mean.abs() <= torch.finfo(mean.dtype).max, mean, average)


class _RingBuffer(nn.Module):
    """A ring buffer on the device: the last M values of a vector (C,)."""

    def __init__(self, window_size: int, num_features: int) -> None:
        super().__init__()
        self.register_buffer('values', torch.zeros(window_size, num_features))
        self.register_buffer('count', torch.zeros((), dtype=torch.int64))
        # A copy of `count` as a Python number, see OfflineNorm.read_numbers().
        self._count = 0

    def read_numbers(self) -> None:
        self._count = read_number(self.count, self._count)

    def push(self, value: Tensor) -> Tensor:
        """Overwrites the oldest value with ``value``; returns the stored values, (M, C), or fewer at first."""
        self.count += 1
        self._count += 1
        self.replace_latest(value)
        return self.values[: self._count]

    def replace_latest(self, value: Tensor) -> None:
        self.values[(self._count - 1) % len(self.values)] = value


@MODELS.register_module()
class UN(QuadraticNorm):
    """Unified Normalization: s^ is the geometric mean of mean x^2 over the last M iterations.

    Per channel, s_t = mean x^2 over all tokens in iteration t. s^ is the geometric mean of the last M values, s_t
    included; the running variance averages s^. Backward: psi <- a psi + (1 - a) mean of the last M values of gs, with
    a = 1 - momentum. The first means are over fewer than M values. During the warm-up s^ = s_t, and the window fills.
    In the geometric mean s is at least eps / 1000, which changes nothing beside eps in the root.

    Outlier filtration: where the arithmetic mean of the window exceeds the geometric mean by more than M V in any
    channel, the whole layer uses s^ = s_t and psi = gs_t for this iteration. The running averages take s_t and gs_t.
    The windows store, in place of s_t and gs_t, the running averages as they were before this iteration. V, one number
    for the layer, is the unbiased variance of the square roots of all M C values in the window before s_t. The filter
    starts after the warm-up, when the window is full.

    This class follows the paper. In the released code the gradient has a factor r between batch and running
    statistics, and the backward averages start after the warm-up.

    :class:`QuadraticNorm` describes the other arguments.

    Args:
        window_size: Values M of the moving means, forward and backward; at least 1.
        filter_outliers: Use outlier filtration, as the paper does for vision; its detectors did not train without it.

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
    ) -> None:
        super().__init__(num_features, eps, momentum, warmup_iters)
        self.window_size = window_size
        self.filter_outliers = filter_outliers
        self.squares = _RingBuffer(window_size, num_features)
        self.gradients = _RingBuffer(window_size, num_features)
        self.register_buffer('num_filtered', torch.zeros((), dtype=torch.int64))

    def smooth_square(self, square: Tensor) -> tuple[Tensor, Tensor | None]:
        # With M = 1 the arithmetic and the geometric mean differ only by rounding.
        starts = max(self.warmup_iters, self.window_size)
        filters = self.filter_outliers and self.window_size > 1 and self._iteration > starts
        spread = self.squares.values.sqrt().var() if filters else None
        window = self.squares.push(square)
        smoothed, is_outlier = square, None
        if self._iteration > self.warmup_iters:
            # Clamped: one batch of zeros would make s^ zero for M iterations.
            smoothed = window.clamp(min=1e-3 * self.eps).log_().mean(0).exp_()
        if filters:
            is_outlier = (window.mean(0) - smoothed).max() > self.window_size * spread
            self.squares.replace_latest(torch.where(is_outlier, self.running_var, square))
            self.num_filtered += is_outlier
            smoothed = torch.where(is_outlier, square, smoothed)
        self.running_var.lerp_(smoothed, self.momentum)
        return smoothed, is_outlier

    def smooth_gradient(self, gradient: Tensor, is_outlier: Tensor | None) -> Tensor:
        if is_outlier is None:
            return self.psi.lerp_(self.gradients.push(gradient).mean(0), self.momentum)
        mean = self.gradients.push(torch.where(is_outlier, self.psi, gradient)).mean(0)
        self.psi.lerp_(torch.where(is_outlier, gradient, mean), self.momentum)
        return torch.where(is_outlier, gradient, self.psi)


@MODELS.register_module()
class MABN(QuadraticNorm):
    """MABN as in the UN paper's comparison: no mean, exponential average forward, simple moving average backward.

    s^ <- a s^ + (1 - a) mean x^2, a = 1 - momentum; psi is the mean of the last M values of gs. The paper's centralized
    weights and the released code's factor r between batch and running statistics are left out.

    :class:`QuadraticNorm` describes the other arguments.

    Args:
        momentum: Weight of the new value in s^; the released code has 0.02.
        window_size: Values M of the backward average, at least 1; 16 in the released code for detectors.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        window_size: int = 16,
        warmup_iters: int = 100,
    ) -> None:
        super().__init__(num_features, eps, momentum, warmup_iters)
        self.window_size = window_size
        self.gradients = _RingBuffer(window_size, num_features)

    def smooth_gradient(self, gradient: Tensor, is_outlier: Tensor | None) -> Tensor:
        return self.psi.copy_(self.gradients.push(gradient).mean(0))


@MODELS.register_module()
class PowerNorm(QuadraticNorm):
    """PowerNorm without its scaling of each token: no mean, exponential averages forward and backward.

    s^ <- a s^ + (1 - a) mean x^2 and psi <- a psi + (1 - a) gs, a = 1 - momentum. As in the UN paper's
    comparison, a token is not divided by its own quadratic mean, which would be no affine map at inference.

    :class:`QuadraticNorm` describes the arguments.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, warmup_iters: int = 10000) -> None:
        super().__init__(num_features, eps, momentum, warmup_iters)

    def smooth_gradient(self, gradient: Tensor, is_outlier: Tensor | None) -> Tensor:
        return self.psi.lerp_(gradient, self.momentum)
