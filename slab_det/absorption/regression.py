"""Ridge regression of a target on the input of a layer, from sums over tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from slab_det.absorption.images import is_held_out
from slab_det.absorption.moments import Affine, CrossMoments
from slab_det.common.errors import ConversionError

# Ridge penalties, in standardised coordinates. A smaller ridge fits the given images better, but with weights in the
# hundreds that cancel. On some other images, and in bfloat16, the weights do not cancel and the outputs explode.
RIDGES = tuple(10.0**power for power in range(-4, 3))
# The ridge where no batch is held out to choose one.
DEFAULT_RIDGE = 1e-2
# A larger ridge is preferred while its error is at most this multiple of the least error.
SLACK = 1.05


def diagonal_fit(moments: CrossMoments) -> Affine:
    """Least-squares fit of ``y_c = s_c (x_c - mean over channels of x) + t_c``: a LayerNorm with a constant sigma.

    For each channel, with ``z = x - mean over channels of x``, ``s = Cov(z, y) / Var(z)`` and ``t = E y - s E z``.
    """
    channels = len(moments.mean_x)
    var = moments.xx.diagonal() - 2 * moments.xx.mean(0) + moments.xx.mean()
    # Rounding noise of a constant channel must not become a slope.
    varies = var > 1e-12 * (moments.count * moments.mean_x.square() + moments.xx.diagonal())
    cov = moments.xy.diagonal() - moments.xy.mean(0)
    slope = torch.where(varies, cov / var.where(varies, 1.0), 0.0)
    centre = torch.eye(channels, dtype=torch.float64, device=moments.xx.device) - 1 / channels
    return _with_shift(moments, slope[:, None] * centre)


def ridge_fits(moments: CrossMoments, prior: Tensor, ridges: tuple[float, ...] = RIDGES) -> Iterator[Affine]:
    """Yields for each ridge r the map that minimises
    ``E |y - M x - t|^2 + r |(M - prior) diag(sigma)|^2 + q |M - prior|^2``.

    sigma are the standard deviations of x, and q is ``moments.rounding``. In standardised coordinates, with
    G = E z z^T and the diagonal R = r + q / sigma^2, ``M = (E y z^T + prior R) (G + R)^-1``. One M serves all layers
    that read y, because the fit is linear in y.

    Args:
        moments: Sums over at least two tokens.
        prior: (C_y, C_x).
        ridges: The values of r.
    """
    var = moments.xx.diagonal() / moments.count
    # A channel that is constant up to rounding keeps the prior.
    varies = var > 1e-12 * (moments.mean_x.square() + var)
    sigma = var.where(varies, 1.0).sqrt()
    gram = moments.xx / (sigma * moments.count)
    gram /= sigma[:, None]
    gram.masked_fill_(~(varies[:, None] & varies), 0.0)
    target = torch.where(varies[:, None], moments.xy / moments.count / sigma[:, None], 0.0)
    start = (prior * sigma).T
    for ridge in ridges:
        pull = ridge + moments.rounding / sigma.square()
        # One factorisation per ridge: an FFN has matrices of hundreds of MB, and eigenvectors would be slower still.
        system = gram.clone()
        system.diagonal().add_(pull)
        factor = torch.linalg.cholesky(system)
        del system
        yield _with_shift(moments, (torch.cholesky_solve(target + pull[:, None] * start, factor) / sigma[:, None]).T)


def _with_shift(moments: CrossMoments, matrix: Tensor) -> Affine:
    return Affine(matrix, moments.mean_y - matrix @ moments.mean_x)


class Split:
    """Sums to fit, and those of held-out batches, which choose the ridge of a fit and measure its error.

    Args:
        fitted: The sums to fit.
        held_out: The sums of held-out batches, without a token where no batch is held out.
    """

    def __init__(self, fitted: CrossMoments, held_out: CrossMoments) -> None:
        self.fitted, self.held_out = fitted, held_out

    def add(self, batch: int, x: Tensor, y: Tensor) -> None:
        """Adds the tokens of a batch; see :meth:`CrossMoments.add`."""
        (self.held_out if is_held_out(batch) else self.fitted).add(x, y)

    def about_zero(self) -> Split:
        """See :meth:`CrossMoments.about_zero`."""
        return Split(self.fitted.about_zero(), self.held_out.about_zero())

    @property
    def measured(self) -> CrossMoments:
        """The sums on which errors are measured: the held-out ones, or the fitted ones where nothing is held out."""
        return self.held_out if self.held_out.count else self.fitted

    def choose_fit(self, prior: Tensor) -> Affine:
        """Returns the fit of the largest ridge whose error on the held-out sums is at most ``SLACK`` times the least.

        Where nothing is held out, returns the fit of ``DEFAULT_RIDGE``.
        """
        if self.held_out.count == 0:
            return next(ridge_fits(self.fitted, prior, (DEFAULT_RIDGE,)))
        least = math.inf
        # Ridges grow: once the error exceeds the bound it stays above, and later factorisations are skipped.
        for fit in ridge_fits(self.fitted, prior):
            share = self.held_out.unexplained(fit)
            least = min(least, share)
            # Rounding may make the share of an exact fit negative.
            if share - least > (SLACK - 1) * abs(least):
                break
            chosen = fit
        return chosen

    def check_finite(self, name: str) -> None:
        """Raises ConversionError, with the name of the fitted norm or layer, unless all sums are finite."""
        if not (self.fitted.is_finite() and self.held_out.is_finite()):
            raise ConversionError(f'{name}: its input or output is NaN or infinite; check weights and images')
