"""BatchNorm over tokens, channels last."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from mmengine.dist import get_world_size
from mmengine.registry import MODELS
from torch import Tensor, nn

from slab_det.norms.base import OfflineNorm
from slab_det.norms.precision import at_least_float32
from slab_det.norms.rep_norm_functions import BatchStatistics, RepBNFunction, as_image
from slab_det.runtime import is_recomputing
from slab_det.runtime.distributed import pool_moments


@MODELS.register_module()
class TokenBN(OfflineNorm):
    """BatchNorm whose statistics pool every token of the batch: ``y = weight (x - mu) / sigma + bias``.

    ``sigma = sqrt(var + eps)``. ``nn.BatchNorm1d`` on (B, L, C) would normalise L instead of C.
    Training normalises with the biased variance of the batch and averages the unbiased one, as PyTorch does.
    The recomputation of activation checkpointing leaves the running statistics alone, and so does a batch with a NaN or
    an infinity in any channel: a gradient scaler skips its step, but nothing would take it out of an average again.
    ``num_skipped`` counts such batches.

    Args:
        num_features: Channels C.
        eps: Added to the variance.
        momentum: Weight of the new batch in the running statistics.
        sync: Pool the batch over all processes in training, each token with the same weight, as SyncBatchNorm does.
            None leaves it to :class:`slab_det.hooks.PoolStatisticsHook`; without that hook it means False.

    Shape:
        (..., C) -> (..., C), channels last.

    Raises:
        ValueError: If the last dimension is not ``num_features``, or on a single token in training.
    """

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float = 0.1, sync: bool | None = None) -> None:
        super().__init__(num_features, eps)
        self.momentum = momentum
        self.sync = sync
        self.weight = nn.Parameter(torch.ones(num_features))
        self.bias = nn.Parameter(torch.zeros(num_features))
        self.register_buffer('running_mean', torch.zeros(num_features))
        self.register_buffer('running_var', torch.ones(num_features))
        self.register_buffer('num_skipped', torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.check_channels(x)
        if self.is_pooling:
            no_eta = self.weight.new_zeros(1)
            return self.normalize_batch(RepBNFunction, x, (self.weight, self.bias, no_eta)).to(x.dtype)
        tokens = x.reshape(-1, self.num_features)
        # The kernels take parameters of the statistics' dtype.
        affine = at_least_float32(self.weight), at_least_float32(self.bias)
        if self.training or self.calibrating:
            # Copies, which the kernel updates, also where nobody wants them: recomputation must save what forward did.
            updated = self.running_mean.clone(), self.running_var.clone()
            y = F.batch_norm(as_image(tokens), *updated, *affine, True, self.momentum, self.eps).permute(0, 2, 3, 1)
            self._replace_statistics(*updated)
        else:
            # The kernel for (1, C, N) rounds as the released code does; the one for channels last does not.
            y = F.batch_norm(
                tokens.t()[None], self.running_mean, self.running_var, *affine, False, self.momentum, self.eps
            ).transpose(1, 2)
        return y.reshape(x.shape)

    # Traced, each gamma of PRepBN would be a graph of its own, and the first kernel of the statistics breaks every one.
    @torch.compiler.disable
    def normalize_batch(
        self, function: type[torch.autograd.Function], x: Tensor, parameters: tuple[Tensor, ...], *constants: float
    ) -> Tensor:
        """A training forward of ``function`` on the tokens of ``x``, (..., C), which the running statistics take in.

        Args:
            function: Of :mod:`slab_det.norms.rep_norm_functions`.
            x: In half precision it is raised to float32, which the result then has.
            parameters: What ``function`` takes between the tokens and their BatchStatistics.
            *constants: What it takes between those and eps.

        Raises:
            ValueError: If the last dimension is not ``num_features``, or on a single token.
        """
        self.check_channels(x)
        tokens = at_least_float32(x).reshape(-1, self.num_features)
        statistics = self.update_running_statistics(tokens)
        # The kernels take no parameters in half precision beside such tokens, and raise.
        parameters = map(at_least_float32, parameters)
        return function.apply(tokens, *parameters, *statistics, *constants, self.eps).view(x.shape)

    @torch.no_grad()
    def _replace_statistics(self, *updated: Tensor) -> None:
        """Takes these as running mean and variance, unless one is not finite or the forward is not one that counts."""
        if self.calibrating or is_recomputing():
            return
        # 0 times an infinity or a NaN is NaN, which counts as true: half as many kernels as isfinite().
        is_bad = (0 * torch.stack(updated)).any()
        for value, new in zip((self.running_mean, self.running_var), updated, strict=True):
            torch.where(is_bad, value, new, out=value)
        self.num_skipped += is_bad

    @property
    def is_pooling(self) -> bool:
        """Whether a forward now takes its statistics from the tokens of all processes."""
        # Recalibration gives each process a number of batches of its own.
        return bool(self.sync) and self.training and not self.calibrating and get_world_size() > 1

    @torch.no_grad()
    def update_running_statistics(self, tokens: Tensor) -> BatchStatistics:
        """Takes a batch into the running statistics, but where :meth:`_replace_statistics` says that it must not count.

        Args:
            tokens: (N, C), float32 at least.

        Returns:
            What a training forward normalises the batch by.

        Raises:
            ValueError: On a single token.
        """
        num_tokens = None
        count = len(tokens)
        if count < 2 and not self.is_pooling:
            raise ValueError(
                f'{type(self).__name__} in training needs more than 1 token in a batch; '
                'take larger images or batches, or set norm_eval=True'
            )
        mean, var = torch.batch_norm_update_stats(as_image(tokens), None, None, self.momentum)
        if self.is_pooling:
            counts, pooled_mean, m2 = pool_moments(mean.new_full((1,), count), mean, var * count)
            mean, var, num_tokens = pooled_mean.to(mean), (m2 / counts).to(mean), counts.to(mean)
            count = num_tokens
        unbiased = var * (count / (count - 1))
        self._replace_statistics(
            self.running_mean.lerp(mean, self.momentum), self.running_var.lerp(unbiased, self.momentum)
        )
        return BatchStatistics(mean, var, num_tokens, None, self.is_pooling)

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
