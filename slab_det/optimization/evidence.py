"""How far the expected loss of AP can be trusted: what students of our benchmarks were expected to lose, and lost."""

from __future__ import annotations

# Expected and lost AP of each student of benchmarks/results/ruler.json, in points, in the order of the file.
# tests/optimization/test_evidence.py compares them.
# fmt: off
STUDENTS: tuple[tuple[float, float], ...] = (
    (-0.1, 0.0), (4.8, 1.8), (0.0, -0.4), (1.8, 0.7), (-0.0, 0.1), (-0.1, 0.1), (-0.0, 0.0), (-0.0, 0.0),
    (-0.1, 0.6), (0.4, -1.0), (0.8, 0.4), (2.4, 0.1), (1.8, 1.8), (4.5, 2.5), (-0.1, 0.1), (-0.7, 0.0),
    (0.7, -0.4), (1.9, 0.2), (-0.2, -0.1), (-0.0, 0.0), (0.0, -0.1), (1.3, -0.8), (-0.0, 0.0), (0.0, 0.0),
    (-0.1, 0.0), (-0.1, 0.0), (0.1, 0.2), (0.1, 0.3), (0.1, -0.3), (1.1, -0.1), (-0.1, 0.3), (1.3, 0.8),
    (0.9, 0.8), (4.2, 4.4), (-0.1, -0.1), (0.6, -0.1), (0.2, 0.4), (0.7, 0.8), (0.1, 0.0), (0.2, 0.1),
    (0.6, 0.7), (0.4, 1.1), (-0.0, 0.2), (0.6, 1.0), (1.5, 2.2), (2.2, 3.0), (0.0, 0.1), (0.0, 0.5),
    (0.6, 1.1), (1.6, 2.1), (0.2, 0.2), (0.9, 1.4),
)
# fmt: on


def describe_evidence(max_loss: float) -> str:
    """Says how often students lost more than ``max_loss`` points that were expected to lose at most as many."""
    losses = [loss for expected, loss in STUDENTS if expected <= max_loss]
    if not losses:
        return f'No student was expected to lose at most {max_loss:g}.'
    more = sum(loss > max_loss for loss in losses)
    return f'Of {len(losses)} students of benchmarks expected to lose at most {max_loss:g}, {more} lost more' + (
        f', at most {max(losses):.1f}.' if more else '.'
    )
