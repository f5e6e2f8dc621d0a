"""Standing: which of the measured forms are dropped so far, and which one is chosen."""

from __future__ import annotations

from slab_det.compare.ruler import RetainedAP, retained_ap
from slab_det.inference.forms import BASE, Form
from slab_det.measure.timer import compare_times
from slab_det.optimization.choice import (
    COMMON_ROUNDS,
    SURE_ROUNDS,
    Measured,
    choose,
    find_dropped,
    is_faster,
    summarize,
)
from slab_det.optimization.evaluation import Evaluation
from slab_det.optimization.records import TRUTH, Records


class Standing:
    """Which of the measured forms are dropped so far, and which one is chosen.

    Earlier calls may have measured them too. Everything is computed anew from the records.

    Args:
        records: Keeps what was measured.
        evaluation: Holds the AP that was measured.
        max_loss: The loss of AP in points that a chosen form may have.
    """

    def __init__(self, records: Records, evaluation: Evaluation, max_loss: float) -> None:
        self.records, self.evaluation, self.max_loss = records, evaluation, max_loss
        # By form: the number of images, and the share of the AP. It takes seconds.
        self._retained: dict[str, tuple[int, RetainedAP]] = {}

    @property
    def forms(self) -> dict[str, Form]:
        """The forms that were measured and run on this machine, by their keys."""
        return {
            key: Form.from_dict(info)
            for key, info in self.records.infos.items()
            if key not in self.records.failed and self.records.count(key) >= SURE_ROUNDS
        }

    def measured(self) -> dict[str, Measured]:
        """What was measured of each form that is not dropped, by its key."""
        dropped = self.dropped()
        return {key: self.summarize(form) for key, form in self.forms.items() if key not in dropped}

    def dropped(self) -> dict[str, str]:
        """The forms that lose to another one, and that one, by their keys."""
        return find_dropped({key: self.summarize(form) for key, form in self.forms.items()})

    def summarize(self, form: Form) -> Measured:
        """What was measured of a form; the share of the AP is estimated again only after a further image."""
        key, images = form.key, len(self.records.found[form.key])
        if self._retained.get(key, (None,))[0] != images:
            self._retained[key] = images, retained_ap(*self.records.found_by(TRUTH, BASE.key, key))
        ap, losses = self.evaluation.ap, self.evaluation.losses(key)
        return summarize(self.records, form, self._retained[key][1], ap, losses)

    def is_left(self, form: Form) -> bool:
        """Whether a form may still be chosen."""
        measured = self.measured()
        return form == BASE or (form.key in measured and measured[form.key].loss_range[0] <= self.max_loss)

    def choose(self) -> tuple[str, list[str]]:
        """The key of the form to recommend, and those that are about as good; see :func:`choose`."""
        return choose(self.measured(), self.max_loss, self.is_faster)

    def is_faster(self, one: Measured, other: Measured) -> bool:
        """Whether a form is faster than another one, in the rounds of both where there are enough.

        What slows a round slows both. Forms that were measured at different times share few rounds; then both are
        compared by their times over the original detector's, as :func:`slab_det.optimization.choice.is_faster` says.
        """
        times = self.records.times(one.key, other.key)
        if len(times) < COMMON_ROUNDS:
            return is_faster(one, other)
        return compare_times(times, self.records.times(other.key, one.key)).quartiles[1] < 1

    def entries(self) -> list[dict]:
        """The entry of optimize.json for each form, the fastest first."""
        dropped, (chosen, ties), entries = self.dropped(), self.choose(), []
        best = self.summarize(self.forms[chosen])
        for key, form in self.forms.items():
            measured = self.summarize(form)
            entry = dict(key=key, title=form.title) | self.records.infos[key] | measured.to_dict()
            entry |= dict(loss=measured.loss, ap=self.evaluation.found.get(key))
            entry |= dict(dropped_for=dropped.get(key, ''), tie=key in ties, faster=self.is_faster(measured, best))
            entries.append(entry)
        return sorted(entries, key=lambda entry: entry['ratio'])
