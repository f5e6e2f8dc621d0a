"""Chooses the fastest form of a detector that loses little AP; forms of about the same speed are ties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from slab_det.common.record import Record
from slab_det.compare.ruler import ASSUMED_AP, RetainedAP
from slab_det.inference.forms import BASE, Form
from slab_det.measure.timer import compare_times
from slab_det.optimization.records import Records

# Losses of AP up to this one, in points, count as none when forms are compared with each other.
NEGLIGIBLE_LOSS = 0.05
# Rounds from which on quartiles are compared. Of two equally fast forms, they call one faster in 2 of 100 trials; after
# half as many rounds they would in 10. With fewer rounds whole ranges are compared.
QUARTILE_ROUNDS = 10
# Rounds of two forms from which on these alone are compared. Of two equally fast forms, the first wins three quarters
# of them in 1 of 100 trials; of ten rounds in 7.
COMMON_ROUNDS = 20
# Rounds that each form gets at first. With fewer, no form is called faster and none is dropped; with this many, the
# ranges of two equally fast forms lie apart in 4 of 1,000 trials.
SURE_ROUNDS = 5


@dataclass(frozen=True)
class Measured(Record):
    """What was measured of a form.

    Attributes:
        key: The form.
        changes: See :attr:`~slab_det.inference.forms.Form.changes`.
        rounds: Number of timed calls.
        median_ms: Median time, from the bytes of an image to its detections.
        ratio: The time over the time of the original detector in the same round, the median over the rounds.
        quartiles: First and third quartile of this ratio.
        extremes: The smallest and the largest of these ratios.
        retained_ap: See :func:`slab_det.compare.ruler.retained_ap`.
        images: Number of images that it rests on.
        detections: Number of detections of the original detector in them.
        expected_loss: The loss of AP that this share means, in points; negative for a gain.
        loss_range: The expected losses at two standard errors above and below the share.
        ap_loss: The measured loss of AP in points, the largest of boxes and masks; None where AP was not measured.
        ap_loss_range: The measured losses at two standard errors below and above; the choice of images causes them.
    """

    key: str
    changes: int
    rounds: int
    median_ms: float
    ratio: float
    quartiles: tuple[float, float]
    extremes: tuple[float, float]
    retained_ap: float
    images: int
    detections: int
    expected_loss: float
    loss_range: tuple[float, float]
    ap_loss: float | None = None
    ap_loss_range: tuple[float, float] | None = None

    @property
    def loss(self) -> float:
        """The loss of AP in points: the measured one, else the expected one."""
        return self.expected_loss if self.ap_loss is None else self.ap_loss


def summarize(
    records: Records,
    form: Form,
    retained: RetainedAP,
    ap: float = ASSUMED_AP,
    ap_losses: tuple[float, float, float] | None = None,
) -> Measured:
    """Summarizes the records of a form.

    Args:
        records: The records.
        form: The form.
        retained: The share of the AP that the form retains.
        ap: The AP of the original detector, in [0, 1].
        ap_losses: The measured loss of AP in points, and its range; None where AP was not measured.
    """
    key, times = form.key, records.times(form.key, BASE.key)
    _, reference = records.found_by(key, BASE.key)
    loss, low, high = (100 * value for value in retained.losses(ap))
    return Measured(
        key=key,
        changes=form.changes,
        rounds=len(times),
        median_ms=float(np.median(records.times(key))),
        **compare_times(times, records.times(BASE.key, key))._asdict(),
        retained_ap=retained.value,
        images=len(reference),
        detections=sum(len(found.scores) for found in reference),
        expected_loss=loss,
        loss_range=(low, high),
        ap_loss=ap_losses and ap_losses[0],
        ap_loss_range=ap_losses and ap_losses[1:],
    )


def is_faster(one: Measured, other: Measured) -> bool:
    """Whether the quartiles of ``one`` lie below those of ``other``.

    If one of both has fewer than ten rounds, its whole range must lie below; with fewer than five, no form is faster.
    """
    rounds = min(one.rounds, other.rounds)
    if rounds < QUARTILE_ROUNDS:
        return rounds >= SURE_ROUNDS and one.extremes[1] < other.extremes[0]
    return one.quartiles[1] < other.quartiles[0]


def find_dropped(measured: Mapping[str, Measured]) -> dict[str, str]:
    """Finds the forms that are slower than a form that loses no more, also at two standard errors.

    From five rounds on the quartiles decide: a form that is dropped by chance is about as fast as another one. The
    original detector is never dropped.

    Args:
        measured: The forms.

    Returns:
        The key of the fastest such form, by the key of the dropped form.
    """
    dropped = {}
    for key, form in measured.items():
        better = [
            other
            for other in measured.values()
            if other.quartiles[1] < form.quartiles[0]
            and min(other.rounds, form.rounds) >= SURE_ROUNDS
            and other.loss_range[1] <= max(form.loss, NEGLIGIBLE_LOSS)
        ]
        if better and key != BASE.key:
            dropped[key] = min(better, key=lambda other: other.ratio).key
    return dropped


def choose(
    measured: Mapping[str, Measured], max_loss: float, is_faster: Callable[[Measured, Measured], bool]
) -> tuple[str, list[str]]:
    """Chooses a form.

    Of the forms with a loss of at most ``max_loss``, those than which no other one is faster are ties. Of the ties, the
    one with the fewest changes is chosen; of several, the one with the smallest expected loss, then the fastest.

    Args:
        measured: The forms, with the original detector.
        max_loss: In points of AP.
        is_faster: Whether the first form is faster than the second one.

    Returns:
        The key of the chosen form, and the keys of the ties, the chosen form among them.
    """
    admissible = [form for form in measured.values() if form.loss <= max_loss]
    ties = [form for form in admissible if not any(is_faster(other, form) for other in admissible)]
    # Losses that differ by less than anybody can measure are the same.
    best = min(ties, key=lambda form: (form.changes, max(form.expected_loss, NEGLIGIBLE_LOSS), form.ratio))
    return best.key, [form.key for form in ties]
