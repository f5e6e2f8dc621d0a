"""Recalibration: running statistics of given images at inference (SLAB, section 4.1, to a fixed point)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field

import torch
from mmdet.models import BatchFixedSizePad
from mmengine.dist import all_reduce, is_main_process
from mmengine.utils import ProgressBar
from torch import Tensor, nn

from slab_det.norms import OfflineNorm, named_offline_norms
from slab_det.recalibration.drift import copy_statistics, largest_drifts
from slab_det.recalibration.moments import Moments, pool_over_ranks
from slab_det.runtime.distributed import raise_on_all_ranks, sum_over_ranks
from slab_det.runtime.errors import SlabDetError

# A norm whose statistics moved further than this in a pass, in sigmas or log variances, had inputs that are far from
# final. Normalising by what it found there would pass the error on: where images differ, it grows from norm to norm,
# and with 32 norms reached 1e14 sigmas, with 50 infinity. At 1 there were more passes than without this (33 for 23), at
# 3 as many.
JUMP = 3.0


class RecalibrationError(SlabDetError):
    """Statistics that cannot be estimated: no data, or values that are not finite."""


@dataclass
class RecalibrationReport:
    """How a recalibration went.

    Attributes:
        num_norms: Norms whose statistics were replaced.
        num_batches: Batches of one pass, over all ranks.
        tol: The bound that stops the passes.
        residuals: Largest change of each pass after the first: of a mean in sigmas, or of a log variance.
        num_by_batch: Norms that normalised by their batch in the last pass, and not as at inference.
        converged: Whether there were none, and the last pass changed no statistic by more than ``tol``.
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
    forward: Callable[[object], object] | None = None,
    max_passes: int | None = None,
    tol: float = 0.01,
    progress: bool = True,
    as_training: bool = False,
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

    Norms that were frozen in training (``norm_eval``, frozen stages) get new statistics too. That is meant: theirs are
    of other data, and all norms have to fit what inference sees. A model whose weights were trained to fit its frozen
    statistics can keep them: do not recalibrate it, ``RecalibrateFuseHook(recalibrate=False)``.

    Args:
        model: A detector or a backbone.
        batches: What a data loader yields, or image tensors (B, 3, H, W); read once per pass.
        forward: Runs the model on one batch; None prepares a batch as ``test_step`` does and stops after the last
            norm.
        max_passes: Passes over ``batches``, at least 1; None for as many as it takes: one more than there are norms.
        tol: Stops when no mean moved by more than this many sigmas and no log variance by more than this.
        progress: Show a progress bar.
        as_training: Pad batches as a ``BatchFixedSizePad`` of the data preprocessor does in training, and only there.

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
        # The last one finds that nothing changed. A norm that is called twice may need more than that.
        max_passes = max(len(norms) + 1, 8)
    if max_passes < 1:
        raise RecalibrationError(f'max_passes must be at least 1, got {max_passes}')
    forward = forward or default_forward(model, norms, as_training)
    old = copy_statistics(norms)
    report = RecalibrationReport(len(norms), 0, tol)
    by_batch = [*norms]
    try:
        with torch.no_grad(), evaluating(model):
            for index in range(max_passes):
                report.num_by_batch = len(by_batch)
                with _normalizing_by_batch([norms[name] for name in by_batch]):
                    moments, report.num_batches = _collect(norms, batches, forward, f'{index + 1}', progress)
                previous = copy_statistics(norms)
                for name, norm in norms.items():
                    norm.set_statistics(moments[name].mean[0], moments[name].var[0])
                _check_kept(norms)
                if index == 0:
                    by_batch = []
                    continue
                drifts = largest_drifts(norms, previous)
                # NaN counts as larger than any number.
                report.residuals.append(torch.tensor([*drifts.values()], dtype=torch.float64).max().item())
                report.converged = not by_batch and report.residuals[-1] <= tol
                if report.converged:
                    break
                # The first of them are final. Every rank decides alike, also one without batches.
                by_batch = [name for name in [*moments][index + 1 :] if not drifts[name] <= JUMP]
    except BaseException:
        for name, norm in norms.items():
            norm.set_statistics(*old[name])
        raise
    return report


def _collect(
    norms: dict[str, OfflineNorm], batches: Iterable, forward: Callable[[object], object], label: str, progress: bool
) -> tuple[dict[str, Moments], int]:
    """One pass: the moments of every norm's input, over all batches and ranks, and the number of batches.

    The norms are in the order in which they were first called, which modules need not have.
    """
    moments = {name: Moments() for name in norms}
    calls: dict[str, int] = {}
    num_batches = 0

    def see(name: str, x: Tensor) -> None:
        calls.setdefault(name, len(calls))
        moments[name].add(x)

    bar = None
    with raise_on_all_ranks(), ExitStack() as stack:
        for name, norm in norms.items():
            handle = norm.register_forward_pre_hook(lambda _, args, name=name: see(name, args[0]))
            stack.callback(handle.remove)
        if progress and is_main_process():
            print(f'Recalibration, pass {label}')
            bar = ProgressBar(len(batches) if hasattr(batches, '__len__') else 0)
        for batch in batches:
            forward(batch)
            num_batches += 1
            _check_finite(moments, num_batches)
            if bar is not None:
                bar.update()
    if bar is not None:
        print()
    pool_over_ranks([*moments.values()], [norm.num_features for norm in norms.values()], 1, _device(norms))
    num_batches = int(sum_over_ranks(torch.tensor(num_batches, device=_device(norms))))
    if num_batches == 0:
        raise RecalibrationError('there was no batch to recalibrate on; check the dataset and its filter_cfg')
    unseen = [name for name in norms if moments[name].count == 0]
    if unseen:
        raise RecalibrationError(f'{", ".join(unseen)}: no batch reached these norms; pass a forward that does')
    # A rank without batches has called none.
    order = torch.tensor([calls.get(name, len(norms)) for name in norms], device=_device(norms))
    all_reduce(order, 'min')
    return {name: moments[name] for _, name in sorted(zip(order.tolist(), norms, strict=True))}, num_batches


def _check_finite(moments: dict[str, Moments], num_batches: int) -> None:
    # One device sync per batch, not one per norm.
    seen = [m for m in moments.values() if m.count]
    if not seen or torch.isfinite(torch.stack([m.mean.sum() + m.scatter.sum() for m in seen])).all():
        return
    for name, m in moments.items():
        if not m.count:
            continue
        for what, value in (('mean', m.mean), ('variance', m.scatter)):
            if not torch.isfinite(value).all():
                kind = 'NaN' if value.isnan().any() else 'infinite'
                raise RecalibrationError(
                    f'{name}: {what} is {kind} after batch {num_batches}; lower the learning rate or check the inputs'
                )


def _check_kept(norms: dict[str, OfflineNorm]) -> None:
    # Moments are float64, and may be finite where the buffers of a norm are not.
    for name, norm in norms.items():
        if not all(torch.isfinite(values).all() for values in norm.statistics()):
            raise RecalibrationError(
                f'{name}: mean or variance is beyond {norm.statistics()[1].dtype}; '
                'lower the learning rate or check the inputs'
            )


def default_forward(model: nn.Module, norms: Iterable[str], as_training: bool = False) -> Callable[[object], object]:
    """Runs ``model`` on a batch of a data loader or of images, no further than needed to reach the modules named.

    ``as_training`` also pads to the fixed size of the training, where the data preprocessor has one.
    """
    before_heads = all(name.startswith(('backbone.', 'neck.')) for name in norms)
    augments = getattr(getattr(model, 'data_preprocessor', None), 'batch_augments', None) or ()
    # Others draw at random, and passes must see the same images.
    pads = [augment for augment in augments if as_training and isinstance(augment, BatchFixedSizePad)]

    def forward(batch: object) -> object:
        if isinstance(batch, Tensor):
            return model.extract_feat(batch) if hasattr(model, 'extract_feat') else model(batch)
        data = model.data_preprocessor(batch, False)
        inputs, samples = data['inputs'], data['data_samples']
        for pad in pads:
            inputs, samples = pad(inputs, samples)
        if before_heads:
            return model.extract_feat(inputs)
        for sample in samples:
            if 'scale_factor' not in sample.metainfo:
                # A training without Resize has none, and heads go back to the size before it.
                sample.set_metainfo(dict(scale_factor=(1.0, 1.0)))
        return model(inputs, samples, mode='predict')

    return forward


def _device(norms: dict[str, OfflineNorm]) -> torch.device:
    return next(iter(norms.values())).statistics()[0].device


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Everything in eval mode, and afterwards each module as it was."""
    training = {module: module.training for module in model.modules()}
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module, mode in training.items():
            module.training = mode


@contextmanager
def _normalizing_by_batch(norms: Sequence[OfflineNorm]) -> Iterator[None]:
    for norm in norms:
        norm.calibrating = True
    try:
        yield
    finally:
        for norm in norms:
            norm.calibrating = False
