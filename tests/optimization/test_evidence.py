"""The report says how often students lost more than they were expected to, by the rows of benchmarks/results."""

from __future__ import annotations

import pytest

from benchmarks.absorb.ruler import RESULTS, students
from benchmarks.results import Results
from slab_det.optimization import evidence


def test_the_students_are_those_of_the_benchmarks() -> None:
    expected = tuple((round(row['expected'], 1), round(row['loss'], 1)) for row in students(Results(RESULTS).rows))
    assert expected == evidence.STUDENTS, f'STUDENTS should be {expected}'


def test_losses_beyond_the_allowed_one_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evidence, 'STUDENTS', ((0.1, 0.2), (-0.3, 0.7), (0.5, 1.2), (0.6, 3.0)))
    text = 'students of benchmarks expected to lose at most'
    assert evidence.describe_evidence(0.5) == f'Of 3 {text} 0.5, 2 lost more, at most 1.2.'
    assert evidence.describe_evidence(5) == f'Of 4 {text} 5, 0 lost more.'
    assert evidence.describe_evidence(-1) == 'No student was expected to lose at most -1.'
