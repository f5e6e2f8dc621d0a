"""BatchNorm over tokens, and its re-parameterized form (SLAB, Guo et al., ICML 2024, eq. 2 and 4)."""

from __future__ import annotations

import torch
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable

from slab_det.norms.base import OfflineNorm, at_least_float32, is_recomputing


@MODELS.register_module()
class TokenBN(OfflineNorm):
    """BatchNorm with statistics over all tokens of the batch: ``y = weight (x - mu) / sigma + bias``.

    ``sigma = sqrt(var + eps)``. ``nn.BatchNorm1d`` on (B, L, C) would normalise L instead of C.
    As in PyTorch, training normalises by the biased variance, and ``running_var`` averages the unbiased variance.
    :class:`OfflineNorm` describes the other arguments and the shape.

    Args:
        momentum: Weight of the new batch in the running statistics.

    Raises:
        ValueError: On a single token in training.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps)
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        # RepBN sets it.
        self.eta = None
        self.register_buffer('running_mean', torch.zeros(num_features))
        self.register_buffer('running_var', torch.ones(num_features))

    def train_forward(self, x: Tensor) -> Tensor:
        if x.shape[:-1].numel() < 2:
            raise ValueError(
                f'{type(self).__name__}({self.num_features}) got {tuple(x.shape)}: the variance of a batch needs more '
                'than one token; train with larger images or batches, or set norm_eval=True for loaded statistics'
            )
        # The kernel needs parameters in the dtype of the running statistics.
        weight, bias = at_least_float32(self.weight), at_least_float32(self.bias)
        # A channels-last image (1, C, 1, N): on a CPU the kernel for images is 7 times as fast as the one for (N, C).
        image = x.reshape(1, 1, -1, self.num_features).permute(0, 3, 1, 2)
        return _BatchNorm.apply(image, weight, bias, self.eta, self).permute(0, 2, 3, 1).reshape(x.shape)

    def inference_affine(self) -> tuple[Tensor, Tensor]:
        scale = self.weight / (self.running_var + self.eps).sqrt()
        return scale, self.bias - self.running_mean * scale

    def statistics(self) -> tuple[Tensor, Tensor]:
        return self.running_mean, self.running_var

    @torch.no_grad()
    def set_statistics(self, mean: Tensor, var: Tensor) -> None:
        self.running_mean.copy_(mean)
        self.running_var.copy_(var)


@MODELS.register_module()
class RepBN(TokenBN):
    """``BN(x) + eta * x``, with one learnable eta per layer.

    Trains with batch statistics over every token; at inference it is the affine map of Lemma 4.1:
    scale = alpha / sigma + eta, shift = beta - alpha * mu / sigma, sigma = sqrt(var + eps).
    :class:`TokenBN` describes the other arguments.

    Args:
        eta: Initial value of eta; the authors use 1. A PVT trained from scratch needs less, such as 0.1: the variance
            of its residual stream is not near 1, and over tens of norms ``eta x`` grows without bound.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, eta: float = 1.0) -> None:
        super().__init__(num_features, eps, momentum)
        self.eta = nn.Parameter(torch.full((1,), float(eta)))

    def inference_affine(self) -> tuple[Tensor, Tensor]:
        scale, shift = super().inference_affine()
        return scale + self.eta, shift


class _BatchNorm(torch.autograd.Function):
    """``BN(x) + eta x`` in few kernels: the gradient of eta follows from the gradients of weight and bias."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, weight: Tensor, bias: Tensor, eta: Tensor | None, norm: TokenBN) -> Tensor:
        # Under activation checkpointing, the first forward has updated the running statistics already.
        updates = not (norm.calibrating or is_recomputing())
        running = (norm.running_mean, norm.running_var) if updates else (None, None)
        y, mean, inverse_sigma = torch.native_batch_norm(x, weight, bias, *running, True, norm.momentum, norm.eps)
        ctx.save_for_backward(x, weight, eta, mean, inverse_sigma)
        ctx.eps = norm.eps
        if eta is None:
            return y
        # Autocast would copy x to float32.
        with torch.autocast(x.device.type, enabled=False):
            return torch.addcmul(y, x, eta)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, eta, mean, inverse_sigma = ctx.saved_tensors
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            grad.to(x.dtype), x, weight, None, None, mean, inverse_sigma, True, ctx.eps, [True] * 3
        )
        grad_eta = None
        if eta is not None:
            grad_x = grad_x.addcmul(grad, eta).to(x.dtype)
            # Sums over the tokens: grad_weight of g (x - mean) / sigma, grad_bias of g, grad_eta of g x.
            grad_eta = torch.addcmul(grad_weight / inverse_sigma, grad_bias, mean).sum().to(eta.dtype).view(1)
        return grad_x, grad_weight, grad_bias, grad_eta, None
