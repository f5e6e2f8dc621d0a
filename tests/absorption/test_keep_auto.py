"""keep='auto': the numbers of LayerNorms that absorb tries, and the student that it returns."""

from types import SimpleNamespace

import pytest

from slab_det.absorption import AbsorptionReport, NormAbsorption
from slab_det.absorption.absorb import LEAST_RETAINED_AP, absorb_until_agreement


@pytest.mark.parametrize(
    ('num_norms', 'enough', 'tried', 'kept'),
    [
        (24, 0, [0], 0),
        (24, 1, [0, 6, 3, 1], 1),
        (24, 4, [0, 6, 3, 4], 4),
        (24, 6, [0, 6, 3, 4, 5], 6),
        # Neither student agrees; the one that keeps a quarter agrees better.
        (24, 7, [0, 6], 6),
        (7, 1, [0, 1], 1),
        (3, 1, [0], 0),
    ],
)
def test_bisection_finds_the_fewest_norms_up_to_a_quarter(num_norms, enough, tried, kept):
    counts = []
    make, compare = counting(num_norms, counts, lambda count: LEAST_RETAINED_AP + 0.001 * (count - enough))
    assert (absorb_until_agreement(make, compare, progress=False).kept, counts) == (kept, tried)


@pytest.mark.parametrize(('num_norms', 'tried'), [(24, [0, 6]), (3, [0])])
def test_a_quarter_is_kept_where_agreement_is_undefined(num_norms, tried):
    make, compare = counting(num_norms, counts := [], lambda count: None)
    assert absorb_until_agreement(make, compare, progress=False).kept == tried[-1]
    assert counts == tried


def test_no_norm_is_kept_where_a_quarter_agrees_less():
    make, compare = counting(24, counts := [], lambda count: 0.8 - 0.001 * count)
    assert absorb_until_agreement(make, compare, progress=False).kept == 0
    assert counts == [0, 6]


def counting(num_norms, counts, agreement):
    """Fake make and compare functions; make appends the number of kept norms to ``counts``."""

    def make(names):
        counts.append(len(names))
        norms = [NormAbsorption(f'norm{i}', 'absorbed', own=0.5) for i in range(num_norms)]
        return SimpleNamespace(absorption_report=AbsorptionReport(norms), kept=len(names))

    def compare(student):
        student.absorption_report.retained_ap = agreement(student.kept)

    return make, compare
