"""Split: sums over the batches of a fit, apart from those over the batches that are held out from all fits."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from slab_det.absorption.images import is_held_out
from slab_det.absorption.moments import Affine, CrossMoments
from slab_det.absorption.regression import choose_fit
from slab_det.runtime.errors import ConversionError


class Split:
    """Sums to fit, and those of held-out batches, which choose the ridge of a fit and measure its error.

    Args:
        fitted: The sums to fit.
        held_out: The sums of held-out batches, without a token where no batch is held out.
    """

    def __init__(self, fitted: CrossMoments, held_out: CrossMoments) -> None:
        self.fitted, self.held_out = fitted, held_out

    def add(self, batch: int, x: Tensor, y: Tensor | None = None, weight: Tensor | None = None) -> None:
        """Adds the tokens of a batch; see :meth:`CrossMoments.add`."""
        (self.held_out if is_held_out(batch) else self.fitted).add(x, y, weight)

    def map(self, change: Callable[[CrossMoments], CrossMoments]) -> Split:
        """Returns the changed sums."""
        return Split(change(self.fitted), change(self.held_out))

    @property
    def measured(self) -> CrossMoments:
        """The sums on which errors are measured: the held-out ones, or the fitted ones where nothing is held out."""
        return self.held_out if self.held_out.count else self.fitted

    def choose_fit(self, prior: Tensor) -> Affine:
        """See :func:`slab_det.absorption.regression.choose_fit`."""
        return choose_fit(self.fitted, self.held_out, prior)

    def check_finite(self, name: str) -> None:
        """Raises ConversionError, with the name of the fitted norm or layer, unless all sums are finite."""
        for part in (self.fitted, self.held_out):
            if part.count and not (part.xx.isfinite().all() and part.yy.isfinite().all()):
                raise ConversionError(f'{name}: its input or output is NaN or infinite; check weights and images')
