"""RepBN and the LayerNorm-RepBN mixture of training, with as few passes over the tokens as PyTorch's kernels allow.

Written as a sum of layers, the mixture of SLAB's eq. 3 makes seven new tensors of the size of its input. Here factors
per channel are multiplied with each other before they meet the tokens, and what is left adds in place. Only the input
and statistics are kept; PyTorch's backward kernels compute the normalized values again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from slab_det.runtime.distributed import sum_over_ranks


def as_image(tokens: Tensor) -> Tensor:
    """(N, C) as a channels-last image (1, C, 1, N): on a CPU its kernel is 7 times as fast as the one for (N, C)."""
    return tokens[None, None].permute(0, 3, 1, 2)


class BatchStatistics(NamedTuple):
    """What a batch of tokens (N, C) is normalised by, and which tokens it comes from.

    Attributes:
        mean: (C,).
        var: Biased, (C,).
        num_tokens: How many tokens they come from, broadcasts to (C,); None if from these N.
        excluded: Places of those of the N that have no part in them, ascending; None if all have.
        is_pooled: Whether other processes have a part in them.
    """

    mean: Tensor
    var: Tensor
    num_tokens: Tensor | None
    excluded: Tensor | None
    is_pooled: bool


class RepBNFunction(torch.autograd.Function):
    """``alpha (x - mu) / sigma + beta + eta x`` for tokens (N, C); mu and sigma are those of a BatchStatistics."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        alpha: Tensor,
        beta: Tensor,
        eta: Tensor,
        mean: Tensor,
        var: Tensor,
        num_tokens: Tensor | None,
        excluded: Tensor | None,
        is_pooled: bool,
        eps: float,
    ) -> Tensor:
        inv_sigma = (var + eps).rsqrt()
        scale, shift = _affine(alpha, beta, eta, mean, inv_sigma)
        ctx.is_pooled = is_pooled
        ctx.save_for_backward(x, alpha, eta, mean, inv_sigma, num_tokens, excluded)
        return torch.addcmul(shift, x, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, alpha, eta, mean, inv_sigma, *origin = ctx.saved_tensors
        grad = grad.contiguous()
        grad_x, grad_alpha, grad_beta = _batch_norm_backward(grad, x, alpha, mean, inv_sigma, *origin, ctx.is_pooled)
        grad_x.addcmul_(grad, eta)
        return grad_x, grad_alpha, grad_beta, _grad_eta(grad_alpha, grad_beta, mean, inv_sigma), *[None] * 6


class MixedNormFunction(torch.autograd.Function):
    """``gamma LN(x) + (1 - gamma) RepBN(x)`` for tokens (N, C) (SLAB, eq. 3)."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        alpha: Tensor,
        beta: Tensor,
        eta: Tensor,
        mean: Tensor,
        var: Tensor,
        num_tokens: Tensor | None,
        excluded: Tensor | None,
        is_pooled: bool,
        gamma: float,
        ln_eps: float,
        eps: float,
    ) -> Tensor:
        inv_sigma = (var + eps).rsqrt()
        rest = 1.0 - gamma
        scale, shift = _affine(alpha, beta, eta, mean, inv_sigma)
        weight = gamma * weight
        y, token_mean, token_inv_sigma = torch.native_layer_norm(
            x, x.shape[1:], weight, torch.add(gamma * bias, shift, alpha=rest), ln_eps
        )
        ctx.gamma = gamma
        ctx.is_pooled = is_pooled
        ctx.save_for_backward(
            x, weight, bias, alpha, eta, mean, inv_sigma, token_mean, token_inv_sigma, num_tokens, excluded
        )
        return y.addcmul_(x, rest * scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, alpha, eta, mean, inv_sigma, token_mean, token_inv_sigma, *origin = ctx.saved_tensors
        gamma, rest = ctx.gamma, 1.0 - ctx.gamma
        grad = grad.contiguous()
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad, x, x.shape[1:], token_mean, token_inv_sigma, weight, bias, [True] * 3
        )
        grad_x_bn, grad_alpha, grad_beta = _batch_norm_backward(
            grad, x, rest * alpha, mean, inv_sigma, *origin, ctx.is_pooled
        )
        grad_x.add_(grad_x_bn).addcmul_(grad, rest * eta)
        grad_eta = _grad_eta(grad_alpha, grad_beta, mean, inv_sigma)
        return (
            grad_x,
            gamma * grad_weight,
            gamma * grad_bias,
            rest * grad_alpha,
            rest * grad_beta,
            rest * grad_eta,
            *[None] * 8,
        )


def _affine(alpha: Tensor, beta: Tensor, eta: Tensor, mean: Tensor, inv_sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and shift of Lemma 4.1, (C,) each."""
    scale = alpha * inv_sigma
    return scale + eta, torch.addcmul(beta, mean, scale, value=-1)


def _batch_norm_backward(
    grad: Tensor,
    x: Tensor,
    alpha: Tensor,
    mean: Tensor,
    inv_sigma: Tensor,
    num_tokens: Tensor | None,
    excluded: Tensor | None,
    is_pooled: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``alpha (x - mu) / sigma + beta`` by x, (N, C), and by alpha and beta, (C,).

    Those by alpha and beta are of this process, as data parallelism expects; in the one by x, mu and sigma depend on x.
    """
    grad_x, grad_alpha, grad_beta = torch.ops.aten.native_batch_norm_backward(
        as_image(grad), as_image(x), alpha, None, None, mean, inv_sigma, True, 0.0, [True] * 3
    )
    grad_x = grad_x.permute(0, 2, 3, 1).view(x.shape)
    if num_tokens is not None:
        # The kernel took the means of dy and dy (x - mu) / sigma over its own tokens for those over all tokens.
        own = torch.stack([grad_alpha, grad_beta])
        wanted = (sum_over_ranks(own) if is_pooled else own) / num_tokens
        slope, intercept = _line(own / len(x) - wanted, alpha, mean, inv_sigma)
        grad_x.addcmul_(x, slope).add_(intercept)
        if excluded is not None:
            # mu and sigma do not depend on these.
            slope, intercept = _line(wanted, alpha, mean, inv_sigma)
            grad_x.index_add_(0, excluded, torch.addcmul(intercept, x.index_select(0, excluded), slope))
    return grad_x, grad_alpha, grad_beta


def _line(means: Tensor, alpha: Tensor, mean: Tensor, inv_sigma: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and intercept in x, (C,), of ``alpha / sigma (b + a (x - mu) / sigma)`` for means (a, b), (2, C)."""
    scale = alpha * inv_sigma
    slope = scale * inv_sigma * means[0]
    return slope, torch.addcmul(scale * means[1], mean, slope, value=-1)


def _grad_eta(grad_alpha: Tensor, grad_beta: Tensor, mean: Tensor, inv_sigma: Tensor) -> Tensor:
    """The sum of dy x over tokens and channels, (1,), from the sums per channel that BatchNorm's gradients are."""
    return torch.addcmul(grad_alpha / inv_sigma, mean, grad_beta).sum(0, keepdim=True)
