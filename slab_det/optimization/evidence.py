"""What students of our benchmarks lost whose agreement announced little: how far a loss can be trusted."""

from __future__ import annotations

from slab_det.compare.agreement import expected_loss

# For each student that the law of agreement is fitted to: the teacher's AP times (1 - agreement), from 0 to 1, and the
# lost AP in points. tests/optimization/test_evidence.py compares them with benchmarks/results, and prints them.
# fmt: off
STUDENTS = (
    (0.0087, -0.1), (0.0092, 0.0), (0.0096, -0.3), (0.0129, -0.6), (0.0142, -0.1), (0.0202, 0.1),
    (0.0273, -0.2), (0.0281, 0.6), (0.0291, -0.5), (0.0318, -0.5), (0.0339, 0.2), (0.0347, 0.2),
    (0.0348, 0.7), (0.0367, 0.5), (0.0372, 1.5), (0.0373, 0.4), (0.0379, 0.6), (0.0394, -1.2),
    (0.0415, 0.7), (0.0440, -0.4), (0.0469, 1.3), (0.0491, 0.7), (0.0525, 2.0), (0.0547, 0.4),
    (0.0567, 1.5), (0.0585, 1.7), (0.0599, 1.5), (0.0601, 0.5), (0.0603, -0.4), (0.0650, 2.4),
    (0.0663, 1.2), (0.0665, -0.1), (0.0665, 1.7), (0.0669, 1.3), (0.0693, 1.4), (0.0695, 1.9),
    (0.0695, 2.8), (0.0703, 3.6), (0.0718, 2.4), (0.0758, 2.0), (0.0767, 0.1), (0.0769, 2.4),
    (0.0774, 0.6), (0.0783, 1.7), (0.0783, 2.6), (0.0784, 0.7), (0.0784, 0.9), (0.0787, 1.4),
    (0.0818, 2.5), (0.0820, 2.2), (0.0832, 2.0), (0.1681, 7.0), (0.1729, 6.9), (0.1770, 7.6),
)
# fmt: on


def describe_evidence(max_loss: float) -> str:
    """Says how often students lost more than ``max_loss`` points that were expected to lose at most as many."""
    losses = [loss for distance, loss in STUDENTS if 100 * expected_loss(1 - distance, 1.0) <= max_loss]
    if not losses:
        return f'No student was expected to lose at most {max_loss:g}.'
    more = sum(loss > max_loss for loss in losses)
    return f'Of the {len(losses)} expected to lose at most {max_loss:g}, {more} lost more' + (
        f', at most {max(losses):.1f}.' if more else '.'
    )
