"""Recalibration: running statistics of given images at inference (SLAB, section 4.1, to a fixed point)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn

from slab_det.norms import OfflineNorm, named_offline_norms
from slab_det.recalibration.moments import RecalibrationError, collect_moments

# A norm whose statistics moved further than this in a pass, in sigmas or log variances, had inputs that are far from
# final. Normalising by what it found there would pass the error on: where images differ, it grows from norm to norm,
# and with 32 norms reached 1e14 sigmas, with 50 infinity. At 1 there were more passes than without this (33 for 23), at
# 3 as many.
JUMP = 3.0
# Mean and variance, (C,) each, by the name of the norm.
Statistics = dict[str, tuple[Tensor, Tensor]]


@dataclass
class RecalibrationReport:
    """How a recalibration went.

    Attributes:
        num_norms: Norms whose statistics were replaced.
        num_batches: Batches of one pass, over all ranks.
        tol: The bound that stops the passes.
        residuals: Largest change of each pass after the first: of a mean in sigmas, or of a log variance.
        num_by_batch: Norms that normalised by their batch in the last pass, and not as at inference.
        converged: Whether ``num_by_batch`` is 0 and the last pass changed no statistic by more than ``tol``.
    """

    num_norms: int
    num_batches: int
    tol: float
    residuals: list[float] = field(default_factory=list)
    num_by_batch: int = 0
    converged: bool = False

    def to_dict(self) -> dict:
        return {**asdict(self), 'passes': 1 + len(self.residuals)}

    def __str__(self) -> str:
        residuals = ', '.join(f'{residual:.2g}' for residual in self.residuals) or 'not measured'
        text = (
            f'Recalibrated {self.num_norms} norms on {self.num_batches} batches; change per further pass: {residuals}'
        )
        if self.residuals and not self.converged:
            why = (
                f'in the last pass {self.num_by_batch} norms were still normalising by their batch'
                if self.num_by_batch
                else f'the last pass changed more than tol={self.tol}'
            )
            text += (
                f'; {why}, so statistics of late norms may be far off: give it more passes, and every pass the '
                'same images'
            )
        return text


def recalibrate(
    model: nn.Module,
    batches: Iterable,
    max_passes: int | None = None,
    tol: float = 0.01,
    progress: bool = True,
) -> RecalibrationReport:
    """Replaces the running statistics of every offline norm by those of ``batches`` at inference.

    The input of a late norm depends on the statistics of the earlier ones. In the first pass every norm normalises
    with the statistics of its batch; in further passes with those found so far, until the largest change is at most
    ``tol``. Where each norm is called once per forward, and every pass sees the same data, the statistics of the first
    p norms are final after pass p: as many passes as norms always suffice. Until then a norm whose statistics jumped in
    a pass normalises by its batch in the next, or its error would grow from norm to norm where images differ much.
    Passes cut short may leave statistics that are worse than those of the training (docs/results.md shows a case).

    Batches should be as in training, with padding where the training had it: weights are fitted to such statistics, and
    those of other images cost detectors up to 0.05 of their AP (docs/results.md).

    Parameters, gamma and training flags stay as they are; drop-path is off. In a distributed run each rank gives its
    own batches, as many as it has, and all end with the same statistics: those that one process finds on all batches.

    Norms that were frozen in training (``norm_eval``, frozen stages) get new statistics too: the frozen statistics are
    of other data, and all norms have to fit what inference sees. To keep statistics that weights were trained to fit,
    do not recalibrate, ``RecalibrateFuseHook(recalibrate=False)``.

    Args:
        model: A detector or a backbone.
        batches: A data loader or image tensors (B, 3, H, W), read once per pass. Batches of a loader are prepared as
            ``test_step`` does; where the data preprocessor pads to a fixed size in training (``BatchFixedSizePad``),
            they are padded so too, unless the loader's dataset has ``test_mode``.
        max_passes: Passes over ``batches``, at least 1; None for as many as it takes: one more than there are norms.
        tol: Stops when no mean moved by more than this many sigmas and no log variance by more than this.
        progress: Show a progress bar.

    Returns:
        The number of passes and the change that each made.

    Raises:
        RecalibrationError: Without offline norms or batches, if ``batches`` can be read only once, or if statistics
            are not finite; the model then has its old ones.
        RankError: On all other ranks, if one cannot go on.
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
        # The last pass finds that nothing changed. A norm that is called twice may need more than one pass.
        max_passes = max(len(norms) + 1, 8)
    if max_passes < 1:
        raise RecalibrationError(f'max_passes must be at least 1, got {max_passes}')
    report = RecalibrationReport(len(norms), 0, tol)
    by_batch = list(norms)
    with _restoring_on_error(norms):
        for index in range(max_passes):
            report.num_by_batch = len(by_batch)
            title = f'Recalibration, pass {index + 1}' if progress else None
            with _normalizing_by_batch([norms[name] for name in by_batch]):
                moments, report.num_batches = collect_moments(model, norms, lambda x, y: (x,), batches, title)
            previous = copy_statistics(norms)
            for name, norm in norms.items():
                norm.set_statistics(moments[name].mean[0], moments[name].var[0])
            _check_representable(norms)
            if index == 0:
                by_batch = []
                continue
            drifts = {name: statistics_drift({name: norm}, previous).largest for name, norm in norms.items()}
            # NaN counts as larger than any number.
            report.residuals.append(torch.tensor([*drifts.values()], dtype=torch.float64).max().item())
            report.converged = not by_batch and report.residuals[-1] <= tol
            if report.converged:
                break
            # The first index + 1 norms in the order of calls are final. Every rank decides alike.
            by_batch = [name for name in list(moments)[index + 1 :] if not drifts[name] <= JUMP]
    return report


@dataclass(frozen=True)
class Drift:
    """Distances of the statistics after from the statistics before.

    Attributes:
        mean: |mean after - mean before| / sigma before, averaged over all channels of all norms.
        largest_mean: The largest such distance.
        log_var: |log variance after - log variance before|, averaged; eps is part of the variance.
        largest_log_var: The largest such distance.
    """

    mean: float
    largest_mean: float
    log_var: float
    largest_log_var: float

    @property
    def largest(self) -> float:
        """The larger of both maxima; NaN where one of them is NaN."""
        return torch.tensor([self.largest_mean, self.largest_log_var], dtype=torch.float64).max().item()

    def to_dict(self) -> dict[str, float | None]:
        """For JSON: None in place of a number that is not finite."""
        return {name: value if math.isfinite(value) else None for name, value in asdict(self).items()}


def copy_statistics(norms: Mapping[str, OfflineNorm]) -> Statistics:
    """Copies of the statistics that the norms have now."""
    return {name: tuple(values.clone() for values in norm.statistics()) for name, norm in norms.items()}


def statistics_drift(norms: Mapping[str, OfflineNorm], before: Statistics) -> Drift:
    """How far the statistics that ``norms`` have now are from ``before``.

    Args:
        norms: At least one, all on one device.
        before: What :func:`copy_statistics` returned for these norms, or for more.
    """
    means, log_vars = [], []
    for name, norm in norms.items():
        # statistics(), not the moments found: a norm without mean keeps none, and its variance is the mean of x^2.
        old_mean, old_var, mean, var = (values.double() for values in (*before[name], *norm.statistics()))
        means.append((mean - old_mean).abs() / (old_var + norm.eps).sqrt())
        log_vars.append(((var + norm.eps) / (old_var + norm.eps)).log().abs())
    means, log_vars = torch.cat(means), torch.cat(log_vars)
    return Drift(*torch.stack([means.mean(), means.max(), log_vars.mean(), log_vars.max()]).tolist())


def _check_representable(norms: Mapping[str, OfflineNorm]) -> None:
    # Moments are float64, and may be finite where the buffers of a norm are not.
    for name, norm in norms.items():
        if not all(values.isfinite().all() for values in norm.statistics()):
            raise RecalibrationError(
                f'{name}: mean or variance is beyond {norm.statistics()[1].dtype}; '
                'lower the learning rate or check the inputs'
            )


@contextmanager
def _restoring_on_error(norms: Mapping[str, OfflineNorm]) -> Iterator[None]:
    before = copy_statistics(norms)
    try:
        yield
    except BaseException:
        for name, norm in norms.items():
            norm.set_statistics(*before[name])
        raise


@contextmanager
def _normalizing_by_batch(norms: Iterable[OfflineNorm]) -> Iterator[None]:
    for norm in norms:
        norm.calibrating = True
    try:
        yield
    finally:
        for norm in norms:
            norm.calibrating = False
