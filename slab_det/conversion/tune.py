"""tune: a short training without labels, in which a student meets its teacher."""

from __future__ import annotations

import copy
import math
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain, islice, repeat

import torch
from mmengine.utils import ProgressBar
from torch import Tensor, nn

from slab_det.conversion.distill import Distillation, DistillationError, mean_relative_error
from slab_det.recalibration.moments import prepare_inputs

# Batches on which the error is measured before and after.
NUM_MEASURED = 4
# An error that grows to so many times that of the start means that what absorption found is being destroyed.
# Batches differ by less than a factor of two.
GROWTH = 3.0


@dataclass
class TuneReport:
    """How a tune went.

    Attributes:
        start: Relative error of the feature maps before, on the first batches; see
            :func:`slab_det.conversion.distill.mean_relative_error`.
        end: The same afterwards, on the same batches.
        tenths: Its mean over the batches of each tenth of the iterations.
    """

    start: float
    end: float = math.nan
    tenths: list[float] = field(default_factory=list)

    def to_dict(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        tenths = ', '.join(f'{error:.2g}' for error in self.tenths)
        return f'FPN error {self.start:.3g} before, {self.end:.3g} after; per tenth of the iterations: {tenths}'


def tune(
    student: nn.Module,
    teacher: nn.Module,
    batches: Iterable,
    iterations: int = 150,
    lr: float = 2.5e-4,
    backbone_lr_mult: float = 0.1,
    progress: bool = True,
    **weights: float,
) -> tuple[nn.Module, TuneReport]:
    """Trains ``student``, in place, to compute what ``teacher`` does; no labels are read.

    AdamW without weight decay, a linear warm-up over a tenth of the iterations, at most 20, then a cosine to a
    hundredth of ``lr``, gradients clipped to norm 5. The student stays in eval mode: statistics are frozen, and
    drop-path and dropout, which the teacher does not have either, are off. Frozen parameters stay frozen.

    Args:
        student: A detector, for example what :func:`slab_det.absorb` returns, on the device of the teacher.
        teacher: The detector that it came from; it is set to eval mode.
        batches: A data loader or a list of what one yields or of image tensors (B, 3, H, W), read again from the
            beginning as often as needed. Images are not augmented here; tensors are taken as normalised.
        iterations: Steps of the optimizer, one batch each.
        lr: Highest learning rate of neck and heads.
        backbone_lr_mult: That of the backbone, as a part of ``lr``.
        progress: Show a progress bar with the error of the feature maps.
        weights: See :class:`slab_det.conversion.distill.Distillation`.

    Returns:
        The student, in eval mode, and the errors of its feature maps. A warning is given where these grow.

    Raises:
        DistillationError: If the batches are none or can be read only once, if losses are not finite, or if both
            detectors have outputs of different shapes. After any error the student has its old weights.
        ValueError: If a number is out of its range.
    """
    if iterations < 1 or not lr > 0 or backbone_lr_mult < 0:
        raise ValueError(
            f'iterations={iterations} must be at least 1, lr={lr} above 0, backbone_lr_mult={backbone_lr_mult} at '
            'least 0'
        )
    if isinstance(batches, Iterator):
        raise DistillationError('batches are read several times: pass a list or a data loader, not an iterator')
    distillation = Distillation(teacher, **weights)
    student.eval()
    before = copy.deepcopy(student.state_dict())
    prepare = prepare_inputs(student, batches)
    # A loader that shuffles or augments would give others afterwards.
    measured = [prepare(batch)[0] for batch in islice(batches, NUM_MEASURED)]
    if not measured:
        raise DistillationError('there was no batch of images; check the dataset and its filter_cfg')
    try:
        report = TuneReport(_measure(student, teacher, measured))
        optimizer = _build_optimizer(student, lr, backbone_lr_mult)
        inputs = map(prepare, islice(chain.from_iterable(repeat(batches)), iterations))
        errors = _train(student, distillation, inputs, iterations, optimizer, progress)
        report.tenths = [sum(part) / len(part) for part in _tenths(errors)]
        report.end = _measure(student, teacher, measured)
    except BaseException:
        student.load_state_dict(before)
        raise
    highest = max(report.tenths)
    # Below 1e-6 errors are those of rounding.
    if report.end > max(report.start, 1e-6) or highest > max(GROWTH * report.start, 1e-6):
        warnings.warn(
            f'the tune moved the student away from its teacher: FPN error {report.start:.3g} before, up to '
            f'{highest:.3g} on the way, {report.end:.3g} after; give a lower lr than {lr:g}',
            stacklevel=2,
        )
    return student, report


def _train(
    student: nn.Module,
    distillation: Distillation,
    inputs: Iterable[tuple[Tensor, list]],
    iterations: int,
    optimizer: torch.optim.Optimizer,
    progress: bool,
) -> list[float]:
    """The errors of the feature maps, one for each iteration."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group['params']]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, iterations))
    # Its default is the stdout of the moment at which mmengine was imported.
    bar = ProgressBar(iterations, file=sys.stdout) if progress else None
    errors: list[float] = []
    for images, samples in inputs:
        losses = distillation(student, student.extract_feat(images), images, samples)
        errors.append(losses.pop('feature_error').item())
        optimizer.zero_grad()
        total = sum(losses.values())
        total.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 5.0)
        if not (total + norm).isfinite():
            raise DistillationError(
                f'losses or gradients are not finite in iteration {len(errors)}, with {_name_values(losses)}; give a '
                f'lower lr than {optimizer.defaults["lr"]:g}, or check the images'
            )
        optimizer.step()
        schedule.step()
        if bar is not None:
            bar.update()
            # The next update begins at the left again.
            bar.file.write(f', FPN error {errors[-1]:.4f}')
            bar.file.flush()
    if bar is not None:
        print()
    return errors


@torch.no_grad()
def _measure(student: nn.Module, teacher: nn.Module, batches: list[Tensor]) -> float:
    """The mean error of the feature maps."""
    errors = [
        mean_relative_error(student.extract_feat(images), teacher.extract_feat(images), 'feature maps').item()
        for images in batches
    ]
    return sum(errors) / len(errors)


def _build_optimizer(model: nn.Module, lr: float, backbone_lr_mult: float) -> torch.optim.AdamW:
    groups: dict[bool, list] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[name.startswith('backbone.')].append(parameter)
    groups = [
        dict(params=parameters, lr=lr * (backbone_lr_mult if is_backbone else 1.0))
        for is_backbone, parameters in groups.items()
        if parameters
    ]
    return torch.optim.AdamW(groups, lr=lr, weight_decay=0.0)


def _rate(step: int, iterations: int) -> float:
    """The part of the learning rate in iteration ``step``, the first of which is 0."""
    warmup = min(20, iterations // 10)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    done = (step - warmup) / max(iterations - warmup, 1)
    return 0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2


def _tenths(errors: list[float]) -> list[list[float]]:
    size = math.ceil(len(errors) / 10)
    return [errors[start : start + size] for start in range(0, len(errors), size)]


def _name_values(losses: dict[str, Tensor]) -> str:
    return ', '.join(f'{name} {value.item():.3g}' for name, value in losses.items())
