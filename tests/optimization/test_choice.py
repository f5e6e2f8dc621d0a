"""The fastest form that loses little is chosen; of forms of about the same speed, the one with the fewest changes."""

from __future__ import annotations

import pytest

from slab_det.optimization.choice import Measured, choose, find_dropped, is_faster

MAX_LOSS = 0.5


def form(
    key: str,
    ratio: float,
    changes: int,
    loss: float = 0.0,
    spread: float = 0.01,
    ap_loss: float | None = None,
    sure=True,
    rounds: int = 30,
) -> Measured:
    """A form whose ratio has quartiles at ``spread``, and extremes at four times that."""
    return Measured(
        key=key,
        changes=changes,
        rounds=rounds,
        median_ms=100 * ratio,
        ratio=ratio,
        quartiles=(ratio - spread, ratio + spread),
        extremes=(ratio - 4 * spread, ratio + 4 * spread),
        retained_ap=1.0,
        images=40,
        detections=400,
        expected_loss=loss,
        loss_range=(loss, loss) if sure else (0.0, 4 * loss + 1),
        ap_loss=ap_loss,
    )


def measured(*forms: Measured) -> dict[str, Measured]:
    return {form.key: form for form in (Measured(**{**vars(FORM), 'key': 'eager'}), *forms)}


FORM = form('eager', 1.0, 0)


@pytest.mark.parametrize(
    'forms, chosen, ties',
    [
        # The fastest that loses at most 0.5 AP.
        ([form('deployed', 0.7, 1), form('int8', 0.3, 2, 0.4)], 'int8', ['int8']),
        ([form('deployed', 0.7, 1), form('int8', 0.3, 2, 0.6)], 'deployed', ['deployed']),
        # Quartiles that overlap: fewer changes win, then the smaller loss, then the smaller ratio.
        ([form('deployed', 0.315, 1), form('pruned', 0.3, 3)], 'deployed', ['deployed', 'pruned']),
        ([form('int8', 0.3, 2, 0.4), form('bfloat16', 0.315, 2, 0.01)], 'bfloat16', ['int8', 'bfloat16']),
        ([form('slow', 0.31, 2, 0.01), form('fast', 0.3, 2, 0.04)], 'fast', ['slow', 'fast']),
        # The fastest one overlaps with both others, and one of these is faster than the other.
        (
            [form('fastest', 0.3, 3, spread=0.05), form('pruned', 0.31, 2), form('deployed', 0.34, 1)],
            'pruned',
            ['fastest', 'pruned'],
        ),
        # Nothing is gained.
        ([form('deployed', 0.99, 1), form('int8', 0.985, 2)], 'eager', ['eager', 'deployed', 'int8']),
        ([form('deployed', 1.2, 1)], 'eager', ['eager']),
        # What was measured counts, not what was expected; a lucky measurement does not decide between ties.
        ([form('int8', 0.3, 2, 0.1, ap_loss=0.7), form('deployed', 0.7, 1)], 'deployed', ['deployed']),
        ([form('int8', 0.3, 2, 0.3, ap_loss=-1.0), form('other', 0.31, 2, 0.0)], 'other', ['int8', 'other']),
    ],
)
def test_the_chosen_form(forms, chosen, ties):
    found = choose(measured(*forms), MAX_LOSS, is_faster)
    assert found[0] == chosen
    assert sorted(found[1]) == sorted(ties)


@pytest.mark.parametrize(
    'rounds, ratio, chosen',
    # Quartiles of few rounds lie apart by chance: the ranges count, and with fewer than five rounds nothing does.
    [
        (4, 0.3, 'eager'),
        (5, 0.91, 'fast'),
        (9, 0.91, 'fast'),
        (5, 0.93, 'eager'),
        (9, 0.93, 'eager'),
        (10, 0.93, 'fast'),
    ],
)
def test_a_form_with_few_rounds_is_called_faster_later(rounds, ratio, chosen):
    forms = measured(form('fast', ratio, 1, rounds=rounds))
    assert choose(forms, MAX_LOSS, is_faster) == (chosen, ['fast'] if chosen == 'fast' else ['eager', 'fast'])
    assert ('slow' in find_dropped({**forms, 'slow': form('slow', 1.0, 1)})) == (rounds >= 5)


def test_a_loss_of_zero_leaves_the_original_detector():
    assert choose(measured(form('int8', 0.3, 2, 0.01)), 0.0, is_faster)[0] == 'eager'


def test_a_form_that_is_slower_than_one_that_loses_no_more_is_dropped():
    forms = measured(
        form('fast', 0.5, 2, 0.2),
        form('equal', 0.505, 2, 0.2),
        form('slow', 0.6, 2, 0.2),
        form('slow but better', 0.6, 2, 0.1),
        form('slower', 0.7, 2, 0.3),
    )
    assert find_dropped(forms) == {'slow': 'fast', 'slower': 'fast'}


def test_the_original_detector_and_forms_that_may_lose_less_are_not_dropped():
    assert find_dropped(measured(form('fast', 0.5, 1))) == {}
    assert find_dropped(measured(form('unsure', 0.5, 1, 0.01, sure=False), form('slow', 0.7, 1))) == {}
    # Losses that nobody can measure do not keep a slow form.
    forms = measured(form('fast', 0.5, 1, 0.04), form('slow', 0.7, 1, 0.01))
    assert find_dropped(forms) == {'slow': 'fast'}
