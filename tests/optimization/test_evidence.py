"""The report says how often students lost more than they were expected to, by the rows of benchmarks/results."""

from __future__ import annotations

import pytest

from benchmarks.absorb.loss import find_students
from slab_det.optimization.evidence import STUDENTS, describe_evidence


def test_the_students_are_those_of_the_benchmarks() -> None:
    groups = find_students().values()
    rows = ((ap * (1 - agreement), 100 * loss) for group in groups for ap, agreement, loss in zip(*group, strict=True))
    expected = sorted((round(float(distance), 4), round(float(loss), 1)) for distance, loss in rows)
    assert [*STUDENTS] == expected, f'STUDENTS should be {expected}'


@pytest.mark.parametrize('max_loss', [0.0, 0.5, 2.0])
def test_losses_beyond_the_allowed_one_are_counted(max_loss: float) -> None:
    lost = [loss for distance, loss in STUDENTS if 250 * distance**2 <= max_loss]
    text = describe_evidence(max_loss)
    if not lost:
        assert text == 'No student was expected to lose at most 0.'
    else:
        more = sum(loss > max_loss for loss in lost)
        assert (
            text == f'Of the {len(lost)} expected to lose at most {max_loss:g}, {more} lost more, at most {max(lost)}.'
        )
