"""BatchNorm over tokens, channels last."""
from __future__ import annotations

import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from torch import Tensor, nn

from slab_det.compat import is_recomputing

from .offline_norm import OfflineNorm
from .precision import at_least_float32
from .rep_norm_functions import as_image


@MODELS.register_module()
class TokenBN(OfflineNorm):
    """BatchNorm whose statistics pool every token of the batch: ``y = weight (x - mu) / sigma + bias``.

    ``sigma = sqrt(var + eps)``. ``nn.BatchNorm1d`` on (B, L, C) would normalise L instead of C.
    Training normalises with the biased variance of the batch and averages the unbiased one, as PyTorch does.
    The recomputation of activation checkpointing leaves the running statistics alone.

    Args:
        num_features: Channels C.
        eps: Added to the variance.
        momentum: Weight of the new batch in the running statistics.

    Shape:
        (..., C) -> (..., C), channels last.

    Raises:
        ValueError: If the last dimension is not ``num_features``, or on a single token in training.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__(num_features, eps)
        self.momentum = momentum
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer('running_mean', torch.zeros(num_features))
        self.register_buffer('running_var', torch.ones(num_features))

    def forward(self, x: Tensor) -> Tensor:
        self.check_channels(x)
        tokens = x.reshape(-1, self.num_features)
        if self.training or self.calibrating:
            y = F.batch_norm(as_image(tokens), *self.statistics_to_update(), self.weight, self.bias, True,
                             self.momentum, self.eps).permute(0, 2, 3, 1)
        else:
            # The kernel for (1, C, N) rounds as the released code does; the one for channels last does not.
            y = F.batch_norm(tokens.t()[None], self.running_mean, self.running_var, self.weight, self.bias,
                             False, self.momentum, self.eps).transpose(1, 2)
        return y.reshape(x.shape)

    def statistics_to_update(self) -> tuple[Tensor, Tensor]:
        """Running mean and variance for a kernel that updates them; copies where they must stay as they are."""
        statistics = self.running_mean, self.running_var
        if self.calibrating or is_recomputing():
            # Copies rather than None: recomputation must save as many tensors as the forward did.
            return tuple(value.clone() for value in statistics)
        return statistics

    @torch.no_grad()
    def batch_statistics(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of the batch, tokens (N, C), and the running statistics brought up to date.

        Both are float32 at least, as ``tokens`` must be; running statistics in half precision are rounded once.

        Raises:
            ValueError: On a single token.
        """
        if tokens.shape[0] < 2:
            raise ValueError(f'{type(self).__name__} in training needs more than 1 token in a batch; '
                             'take larger images or batches, or set norm_eval=True')
        statistics = self.statistics_to_update()
        updated = tuple(map(at_least_float32, statistics))
        batch = torch.batch_norm_update_stats(as_image(tokens), *updated, self.momentum)
        for value, new in zip(statistics, updated, strict=True):
            if new is not value:
                value.copy_(new)
        return batch

    @torch.no_grad()
    def inference_affine(self) -> tuple[Tensor, Tensor]:
        scale = self.weight.double() / (self.running_var.double() + self.eps).sqrt()
        return scale, self.bias.double() - self.running_mean.double() * scale

    def statistics(self) -> tuple[Tensor, Tensor]:
        return self.running_mean, self.running_var

    @torch.no_grad()
    def set_statistics(self, mean: Tensor, var: Tensor) -> None:
        self.running_mean.copy_(mean)
        self.running_var.copy_(var)
