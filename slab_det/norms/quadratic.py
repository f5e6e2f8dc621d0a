"""What UN, MABN and PowerNorm share: a quadratic mean that is smoothed over iterations, and so is its gradient."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from mmengine.dist import all_reduce
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from slab_det.norms.base import OfflineNorm
from slab_det.norms.precision import at_least_float32
from slab_det.norms.recent_values import RecentValues
from slab_det.runtime import is_recomputing
from slab_det.runtime.distributed import sum_over_ranks
from slab_det.runtime.errors import SlabDetError


class SmoothedSquare(NamedTuple):
    """What a training forward divides by.

    Attributes:
        own: Sum of x^2 over the tokens of this process, (C,): by it a recomputed forward is recognised.
        square: s^, (C,).
        is_outlier: Whether this iteration is one that moving averages must not see, 0-d; None for norms that do
            not ask.
        is_finite: Whether mean x^2 was finite in every channel, 0-d; otherwise the averages know nothing of it.
        num_tokens: Tokens pooled, 0-d.
    """

    own: Tensor
    square: Tensor
    is_outlier: Tensor | None
    is_finite: Tensor
    num_tokens: Tensor


class QuadraticNorm(OfflineNorm):
    """``y = weight z + bias``, ``z = x / sqrt(s^ + eps)``: a norm without mean, s^ a moving average of mean x^2.

    All tokens of all processes are pooled, per channel. The backward pass does not differentiate s^; a moving average
    psi of ``gs = mean(g z)``, with ``g = weight dy``, stands for its part: ``dx = (g - z psi) / sqrt(s^ + eps)``. A
    subclass says which averages; all that they remember are buffers, so that a run resumes where it was. An iteration
    whose mean x^2 is not finite in some channel, as mixed precision makes them now and then, leaves no trace but in
    ``num_skipped``: no average, window or other counter moves, and it is normalised by the running variance. One whose
    gs alone is not finite leaves none in the backward averages. Averages of gs have the scale of the loss: after a
    gradient scaler has changed it they need as many iterations as they are long.

    torch.compile cannot take the training forward: it breaks the graph there and runs it as it is; with
    ``fullgraph=True`` it raises. Evaluation compiles.

    Args:
        num_features: Channels C.
        eps: Added to s^ inside the root.
        momentum: Weight of the new value in running averages, 1 - a in the papers.
        warmup_iters: So many iterations s^ is the batch's own mean x^2. The averages of the backward pass run from
            the first iteration on.
        sync: Pool the tokens of all processes, each with the same weight; otherwise each process has its own averages.

    Shape:
        (..., C) -> (..., C), channels last; a single token will do.

    Raises:
        ValueError: If the last dimension is not ``num_features``.
        RuntimeError: If activation checkpointing recomputes a forward that is none of the last ``MAX_PENDING``. On
            an accelerator, whose answer no forward waits for, it is an assertion there.

    Attributes:
        running_var: Average of mean x^2, (C,): what inference divides by.
        psi: Latest average of gs, (C,).
        iteration: Training iterations t so far, but for those that were not finite.
    """

    # Training forwards of one norm after which an earlier one can no longer be recomputed. Forwards under no_grad count
    # too: the first pass of reentrant checkpointing is one, and nothing tells it from others. Each keeps 3 C floats.
    MAX_PENDING = 64
    # Distance between a recomputed forward and its first run, as a share of the sum of x^2. 0 but for layers before
    # the norm that do not repeat themselves to the last bit; other batches are further away.
    SAME_BATCH = 1e-3

    def __init__(self, num_features: int, eps: float, momentum: float, warmup_iters: int, sync: bool) -> None:
        super().__init__(num_features, eps)
        self.momentum = momentum
        self.warmup_iters = warmup_iters
        self.sync = sync
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer('running_var', torch.ones(num_features))
        self.register_buffer('psi', torch.zeros(num_features))
        self.register_buffer('iteration', torch.zeros((), dtype=torch.int64))
        self.register_buffer('num_skipped', torch.zeros((), dtype=torch.int64), persistent=False)
        self._recent: deque[SmoothedSquare] = deque(maxlen=self.MAX_PENDING)

    @abstractmethod
    def smooth_square(self, square: Tensor, is_finite: Tensor) -> tuple[Tensor, Tensor | None]:
        """Takes mean x^2 of iteration t into the forward averages.

        Args:
            square: (C,); the running variance where mean x^2 was not finite.
            is_finite: Whether it was, 0-d. If not, everything has to stay as it is.

        Returns:
            s^, (C,), and whether the iteration is an outlier, 0-d or None.
        """

    @abstractmethod
    def smooth_gradient(self, gradient: Tensor, is_outlier: Tensor | None, is_finite: Tensor) -> Tensor:
        """Takes gs of an iteration into the backward averages and returns the psi of this iteration, (C,).

        Args:
            gradient: (C,); the psi so far where gs or mean x^2 was not finite.
            is_outlier: What :meth:`smooth_square` said of the same iteration.
            is_finite: Whether they were, 0-d. If not, everything has to stay as it is.
        """

    @property
    def is_warming_up(self) -> Tensor:
        """Whether iteration t belongs to the warm-up, 0-d."""
        return self.iteration <= self.warmup_iters

    def forward(self, x: Tensor) -> Tensor:
        self.check_channels(x)
        if self.training and not self.calibrating:
            return self._iterate(x)
        values = at_least_float32(x)
        square = _sum_over_tokens(values.square()) / _num_tokens(x) if self.calibrating else self.running_var
        scale = self.weight * (at_least_float32(square) + self.eps).rsqrt()
        return torch.addcmul(self.bias, values, scale).to(x.dtype)

    # What a forward leaves for its recomputation and for backward are Python objects, which no graph can return.
    @torch.compiler.disable
    def _iterate(self, x: Tensor) -> Tensor:
        return _DivideBySmoothedSquare.apply(x, self.weight, self.bias, self)

    def next_square(self, x: Tensor) -> SmoothedSquare:
        """Begins a training iteration with the tokens ``x``, (..., C); a recomputed one gets what it had."""
        own = _sum_over_tokens(x.square())
        if is_recomputing():
            return self._recall(own)
        pooled = self._sum(torch.cat([own, own.new_full((1,), _num_tokens(x))]))
        square, num_tokens = pooled[:-1] / pooled[-1], pooled[-1]
        is_finite = square.isfinite().all()
        self.iteration += is_finite
        self.num_skipped += ~is_finite
        smoothed = self.smooth_square(torch.where(is_finite, square, self.running_var), is_finite)
        self._recent.append(SmoothedSquare(own, *smoothed, is_finite, num_tokens))
        return self._recent[-1]

    def next_psi(
        self, gradient_sum: Tensor, is_outlier: Tensor | None, is_finite: Tensor, num_tokens: Tensor
    ) -> Tensor:
        """psi of an iteration, from the sum of ``g z`` over the tokens of this process, (C,)."""
        gradient = self._sum(gradient_sum) / num_tokens
        is_finite = is_finite & gradient.isfinite().all()
        return self.smooth_gradient(torch.where(is_finite, gradient, self.psi), is_outlier, is_finite)

    def _sum(self, values: Tensor) -> Tensor:
        return sum_over_ranks(values) if self.sync else values

    def _recall(self, own: Tensor) -> SmoothedSquare:
        """The earlier forward that had the same sum of x^2, chosen without waiting for the device.

        Several may be pending, as where two batches share one backward pass, and in any order.

        Raises:
            RuntimeError: If there is none; see the class.
        """
        kind = f'{type(self).__name__}({self.num_features})'
        if not self._recent:
            raise SlabDetError(
                f'{kind}: a training forward inside a backward pass recomputes none that went before; run '
                'forwards of your own, as in gradient hooks, in eval mode, or before backward'
            )
        # Of equal ones the latest, which min finds first.
        recent = list(reversed(self._recent))
        # Overflows of mixed precision: in this batch the other channels decide, in another one they make it another.
        finite = own.isfinite()
        differences = (torch.stack([forward.own for forward in recent]) - own).abs()
        distances = torch.where(finite, differences, 0.0).sum(1).nan_to_num(nan=torch.inf)
        distance, index = distances.min(0, keepdim=True)
        is_same = distance <= self.SAME_BATCH * torch.where(finite, own, 0.0).sum()
        torch._assert_async(
            is_same,
            (
                f'{kind}: the forward to recompute is none of the last {self.MAX_PENDING} in training mode; call '
                'backward after fewer forwards, keep forwards that are not trained on in eval mode, let checkpointing '
                f'preserve the random state; or raise {type(self).__name__}.MAX_PENDING before building the model'
            ),
        )

        def choose(*values: Tensor | None) -> Tensor | None:
            return None if values[0] is None else torch.stack(values).index_select(0, index)[0]

        return SmoothedSquare(*map(choose, *recent))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuadraticNorm:
        # They are of the old device, and no backward pass outlives a move.
        self._recent.clear()
        return super()._apply(fn, recurse)

    @torch.no_grad()
    def reset_state(self) -> None:
        """Starts counters, windows and psi again, as for fine-tuning; running variance and ``num_skipped`` stay."""
        for name, buffer in self.named_buffers():
            if name not in ('running_var', 'num_skipped'):
                buffer.zero_()

    @torch.no_grad()
    def pool_averages(self) -> None:
        """Makes one of the windows, psi and counters of all processes; running variance and ``num_skipped`` stay.

        Windows are pooled by :meth:`RecentValues.pool_over_ranks`. Counters, which differ where batches of some
        processes were not finite, become the largest.
        """
        for window in self.children():
            if isinstance(window, RecentValues):
                window.pool_over_ranks()
        for name, buffer in self.named_buffers(recurse=False):
            if name not in ('running_var', 'num_skipped'):
                all_reduce(buffer, 'mean' if buffer.is_floating_point() else 'max')

    @torch.no_grad()
    def inference_affine(self) -> tuple[Tensor, Tensor]:
        return self.weight.double() / (self.running_var.double() + self.eps).sqrt(), self.bias.double()

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Zeros, since no mean is subtracted, and the mean of x^2."""
        return torch.zeros_like(self.running_var), self.running_var

    @torch.no_grad()
    def set_statistics(self, mean: Tensor, var: Tensor) -> None:
        self.running_var.copy_(var + mean.square())

    def extra_repr(self) -> str:
        return f'{super().extra_repr()}, momentum={self.momentum}, warmup_iters={self.warmup_iters}'


class _DivideBySmoothedSquare(torch.autograd.Function):
    """A training iteration of a QuadraticNorm. Keeps its input and vectors of C; z is computed again."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor, norm: QuadraticNorm) -> Tensor:
        # x^2 overflows float16 from 256 on.
        values = at_least_float32(x)
        smoothed = norm.next_square(values)
        inverse_root = (smoothed.square + norm.eps).rsqrt()
        ctx.norm = norm
        # The decision of this iteration, for its own backward pass, whatever other forwards come between.
        ctx.save_for_backward(x, weight, inverse_root, smoothed.is_outlier, smoothed.is_finite, smoothed.num_tokens)
        return torch.addcmul(bias, values, weight * inverse_root).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse_root, *iteration = ctx.saved_tensors
        grad = at_least_float32(grad)
        grad_weight = _sum_over_tokens(grad * x) * inverse_root
        psi = ctx.norm.next_psi(weight * grad_weight, *iteration)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = grad * (weight * inverse_root)
            grad_x = grad_x.addcmul_(x, psi * inverse_root.square(), value=-1).to(x.dtype)
        return grad_x, grad_weight.to(weight.dtype), _sum_over_tokens(grad).to(weight.dtype), None


def named_quadratic_norms(model: nn.Module) -> dict[str, QuadraticNorm]:
    """Every UN, MABN and PowerNorm of ``model`` by its dotted name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, QuadraticNorm)}


def _num_tokens(x: Tensor) -> int:
    return x.shape[:-1].numel()


def _sum_over_tokens(x: Tensor) -> Tensor:
    """(..., C) -> (C,), without the copy that flattening a transposed map would make."""
    return x.sum_to_size(x.shape[-1])
