"""recalibrate: re-estimates running statistics from images, as inference sees them (SLAB, section 4.1)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from slab_det.common.batches import one_pass
from slab_det.common.record import Record
from slab_det.norms import OfflineNorm, named_offline_norms
from slab_det.recalibration.moments import RecalibrationError, collect_moments

# In sigmas or log variances. If the statistics of a norm change by more in a pass, its inputs were far from final, and
# it normalises by batch again in the next pass. Otherwise errors grow from norm to norm, to 1e14 sigmas after 32 norms.
# A threshold of 1 took more passes than 3 (33 against 23).
JUMP = 3.0


@dataclass
class RecalibrationReport(Record):
    """How a recalibration went.

    Attributes:
        num_norms: Norms whose statistics were replaced.
        num_batches: Batches of one pass, over all ranks.
        tol: The bound that stops the passes.
        residuals: Largest change of each pass after the first: of a mean in sigmas, or of a log variance.
        converged: Whether in the last pass every norm normalised as at inference and no statistic changed by more than
            ``tol``.
    """

    num_norms: int
    num_batches: int
    tol: float
    residuals: list[float] = field(default_factory=list)
    converged: bool = False

    def to_dict(self) -> dict:
        return {**super().to_dict(), 'passes': 1 + len(self.residuals)}

    def lines(self) -> Iterator[str]:
        residuals = ', '.join(f'{residual:.2g}' for residual in self.residuals) or 'not measured'
        text = f'Recalibrated {self.num_norms} norms on {self.num_batches} batches; change per pass: {residuals}'
        if self.residuals and not self.converged:
            text += (
                f'; the last is above tol={self.tol}, so statistics of late norms may be far off: raise max_passes, '
                'and give every pass the same images'
            )
        yield text


def recalibrate(
    model: nn.Module,
    batches: Iterable,
    max_passes: int | None = None,
    tol: float = 0.01,
    progress: bool = True,
) -> RecalibrationReport:
    """Re-estimates the running statistics of every offline norm from its inputs at inference on ``batches``.

    The input of a late norm depends on the statistics of the earlier norms. In the first pass every norm normalises
    with the statistics of each batch, in further passes with its latest statistics, until the largest change is at most
    ``tol``. The statistics of the first p norms are final after pass p: as many passes as norms suffice. Fewer passes
    may leave statistics that are worse than the running averages of the training (benchmarks/README.md shows a case).

    Batches should be as in training, padding included: statistics of other images cost detectors up to 4 AP
    (benchmarks/README.md).

    Parameters, gamma and training flags stay as they are; drop-path is off. Norms that were frozen in training get new
    statistics too. In a distributed run each rank reads its own batches, and all ranks end with the statistics of
    all batches.

    Args:
        model: A detector or a backbone.
        batches: A data loader, or image tensors (B, 3, H, W) that can be read more than once. Every pass reads the
            same epoch of a loader. Its batches are prepared as in ``test_step``. If the data preprocessor pads to a
            fixed size in training (``BatchFixedSizePad``), they are padded too, unless the loader's dataset has
            ``test_mode``.
        max_passes: Passes over ``batches``, at least 1; None for as many as it takes.
        tol: Stops when no mean moved by more than this many sigmas and no log variance by more than this.
        progress: Show a progress bar.

    Returns:
        The number of passes and the change that each made.

    Raises:
        RecalibrationError: If there are no offline norms or batches, ``batches`` can be read only once, or statistics
            are not finite. The model keeps its old statistics.
        DataError: If ``batches`` are no batches of images, or do not fit the model.
        RankError: On all other ranks, if one rank fails.
    """
    norms = dict(named_offline_norms(model))
    if not norms:
        raise RecalibrationError(
            'the model has no offline norm: nothing to recalibrate '
            '(a fused model has none left; recalibrate before fusing)'
        )
    if isinstance(batches, Iterator):
        raise RecalibrationError('batches are read once per pass: pass a list or a data loader, not an iterator')
    if max_passes is None:
        # One pass for each norm, and a last one that finds no change. Norms that are called twice may need more.
        max_passes = max(len(norms) + 1, 8)
    if max_passes < 1:
        raise RecalibrationError(f'max_passes must be at least 1, got {max_passes}')
    if not tol >= 0:
        raise RecalibrationError(f'tol must be a number from 0 on, got {tol}')
    batches = one_pass(batches)
    report = RecalibrationReport(len(norms), 0, tol)
    # Norms that normalise with the statistics of each batch.
    by_batch = list(norms)
    before = copy_statistics(norms)
    try:
        for index in range(max_passes):
            title = f'Recalibration, pass {index + 1}' if progress else None
            previous = copy_statistics(norms)
            order, report.num_batches = _run_pass(model, norms, by_batch, batches, title)
            if index == 0:
                by_batch = []
                continue
            changes = {name: largest_change(norm, previous[name]) for name, norm in norms.items()}
            report.residuals.append(max(changes.values()))
            report.converged = not by_batch and report.residuals[-1] <= tol
            if report.converged:
                break
            # The first index + 1 norms in the order of calls are final.
            by_batch = [name for name in order[index + 1 :] if changes[name] > JUMP]
    except BaseException:
        for name, norm in norms.items():
            norm.set_statistics(*before[name])
        raise
    return report


def _run_pass(
    model: nn.Module, norms: Mapping[str, OfflineNorm], by_batch: Collection[str], batches: Iterable, title: str | None
) -> tuple[list[str], int]:
    """Sets the statistics of all norms; returns their names in the order of calls, and the number of batches."""
    try:
        for name in by_batch:
            norms[name].calibrating = True
        moments, num_batches = collect_moments(model, norms, batches, title)
    finally:
        for norm in norms.values():
            norm.calibrating = False
    # In the order of calls: the first norm that is not finite is the cause of the next ones.
    for name, part in moments.items():
        mean, var = norms[name].statistics()
        norms[name].set_statistics(part.mean.to(mean.device), part.var.to(mean.device))
        # Moments are float64, and may be finite where the buffers of a norm are not.
        if not all(values.isfinite().all() for values in norms[name].statistics()):
            raise RecalibrationError(
                f'{name}: mean or variance is NaN or beyond {var.dtype}; lower the learning rate or check the inputs'
            )
    return list(moments), num_batches


def copy_statistics(norms: Mapping[str, OfflineNorm]) -> dict[str, tuple[Tensor, ...]]:
    """Copies of the statistics that the norms have now."""
    return {name: tuple(values.clone() for values in norm.statistics()) for name, norm in norms.items()}


def largest_change(norm: OfflineNorm, before: tuple[Tensor, ...]) -> float:
    """The largest change of a channel since ``before``: of its mean in sigmas, or of its log variance, eps added."""
    # Not the collected moments: a norm that subtracts no mean has mean 0, and the mean of x^2 as variance.
    old_mean, old_var, mean, var = (values.double() for values in (*before, *norm.statistics()))
    means = (mean - old_mean).abs() / (old_var + norm.eps).sqrt()
    log_vars = ((var + norm.eps) / (old_var + norm.eps)).log().abs()
    return float(torch.cat([means, log_vars]).max())
