"""BatchNorm over tokens, and its re-parameterized form (SLAB, Guo et al., ICML 2024, eq. 2 and 4)."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mmengine.dist import get_world_size
from mmengine.registry import MODELS
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from slab_det.norms.base import OfflineNorm, at_least_float32


@MODELS.register_module()
class TokenBN(OfflineNorm):
    """BatchNorm whose statistics pool every token of the batch: ``y = weight (x - mu) / sigma + bias``.

    ``sigma = sqrt(var + eps)``. ``nn.BatchNorm1d`` on (B, L, C) would normalise L instead of C.
    Training normalises with the biased variance of the batch and averages the unbiased one, as PyTorch does.

    Args:
        num_features: Channels C.
        eps: Added to the variance.
        momentum: Weight of the new batch in the running statistics.
        sync: Pool the batch over all processes in training, each token with the same weight, as SyncBatchNorm does.
            All processes must then call the norm equally often.

    Shape:
        (..., C) -> (..., C), channels last.

    Raises:
        ValueError: If the last dimension is not ``num_features``, or on a single token in training.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, sync: bool = False) -> None:
        super().__init__(num_features, eps)
        self.momentum = momentum
        self.sync = sync
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer('running_mean', torch.zeros(num_features))
        self.register_buffer('running_var', torch.ones(num_features))

    def train_forward(self, x: Tensor) -> Tensor:
        # In recalibration each process has a number of batches of its own.
        if self.sync and not self.calibrating and get_world_size() > 1:
            return self._normalize_pooled(x)
        # As a channels-last image (1, C, 1, N): on a CPU its kernel is 7 times as fast as the one for (N, C).
        image = x.reshape(1, 1, -1, self.num_features).permute(0, 3, 1, 2)
        # The kernel takes parameters of the statistics' dtype.
        weight, bias = at_least_float32(self.weight), at_least_float32(self.bias)
        y = F.batch_norm(image, self.running_mean, self.running_var, weight, bias, True, self.momentum, self.eps)
        return y.permute(0, 2, 3, 1).reshape(x.shape)

    def _normalize_pooled(self, x: Tensor) -> Tensor:
        """Normalises by the tokens of all processes."""
        tokens = at_least_float32(x).reshape(-1, self.num_features)
        var, mean = torch.var_mean(tokens, 0, correction=0)
        # In float64: the difference of mean x^2 and the squared mean loses digits.
        var, mean = var.double(), mean.double()
        count = mean.new_full((1,), len(tokens))
        total = _SumOverProcesses.apply(torch.cat([count, count * mean, count * (var + mean.square())]))
        count, mean, square = total.split([1, self.num_features, self.num_features])
        mean = mean / count
        var = square / count - mean.square()
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
            self.running_var.lerp_((var * count / (count - 1)).to(self.running_var), self.momentum)
        scale = self.weight / (var + self.eps).sqrt()
        shift = self.bias - mean * scale
        return torch.addcmul(shift.to(tokens), tokens, scale.to(tokens)).to(x.dtype).view(x.shape)

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
    Other arguments, shape and errors are those of :class:`TokenBN`.

    Args:
        eta: Where eta starts; 1 is the authors'. A PVT from scratch needs less, such as 0.1: its stream is not near
            unit variance, and in tens of norms ``eta x`` grows without bound (``benchmarks/eta_start.py``).
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, sync: bool = False, eta: float = 1.0
    ) -> None:
        super().__init__(num_features, eps, momentum, sync)
        self.eta = nn.Parameter(torch.full((1,), float(eta)))

    def train_forward(self, x: Tensor) -> Tensor:
        return super().train_forward(x) + self.eta * x

    def inference_affine(self) -> tuple[Tensor, Tensor]:
        scale, shift = super().inference_affine()
        return scale + self.eta, shift


class _SumOverProcesses(torch.autograd.Function):
    """Every process reads the sum, so the gradient of a summand is the sum of the gradients of all processes."""

    @staticmethod
    def forward(ctx: FunctionCtx, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> Tensor:
        return _SumOverProcesses.apply(grad)
