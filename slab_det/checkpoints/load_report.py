"""LoadReport: which weights of a checkpoint were loaded, converted, missing or unused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from slab_det.common.errors import CheckpointError, name_some
from slab_det.common.record import Record


@dataclass
class LoadReport(Record):
    """What happened to every key of the model and of the checkpoint.

    Attributes:
        source: Name of the file, or 'state dict'.
        format: Name of the checkpoint's layout.
        matched: Keys of the model that were filled.
        converted: Matched keys whose values were changed, and how.
        missing: Keys of the model that were not filled, and why; '' where the checkpoint should have them.
        unused: Keys of the checkpoint that were not loaded, and why; '' where the model should have them.
        gammas: gamma of every PRepBN that the checkpoint fills.
        not_finite: Statistics of norms that are NaN or infinite.
    """

    source: str
    format: str = ''
    matched: list[str] = field(default_factory=list)
    converted: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    gammas: dict[str, float] = field(default_factory=dict)
    not_finite: list[str] = field(default_factory=list)

    @property
    def missing_unexpected(self) -> list[str]:
        """Keys that are missing without a reason: the model keeps its initial values."""
        return [key for key, reason in self.missing.items() if not reason]

    @property
    def unused_unexpected(self) -> list[str]:
        """Keys that are unused without a reason: the checkpoint may belong to another model."""
        return [key for key, reason in self.unused.items() if not reason]

    @property
    def complete(self) -> bool:
        """Whether all is finite, and nothing is missing or unused without a reason."""
        return not (self.missing_unexpected or self.unused_unexpected or self.not_finite)

    def check_complete(self) -> None:
        """Raises CheckpointError if weights are missing without a reason: testing and resuming need all weights."""
        if missing := self.missing_unexpected:
            raise CheckpointError(
                f'{self.source}: {len(missing)} weights of the model are missing: {name_some(missing)}; use the config '
                'that the checkpoint was trained with'
            )

    def lines(self) -> Iterator[str]:
        gammas = sorted(Counter(self.gammas.values()).items())
        rows = {
            'matched': str(len(self.matched)),
            'converted': _count_reasons(self.converted),
            'missing': _count_reasons(self.missing),
            'unused': _count_reasons(self.unused),
            'gamma': ', '.join(f'{gamma:g} in {count} norms' for gamma, count in gammas) or 'none',
        }
        if self.not_finite:
            rows['not finite'] = f'{name_some(self.not_finite)}: recalibrate before testing'
        yield f'{self.source} ({self.format})'
        yield from (f'  {name:<10} {text}' for name, text in rows.items())


def _count_reasons(reasons: dict[str, str]) -> str:
    counts = [f'{reason} ({count})' for reason, count in Counter(reasons.values()).items() if reason]
    unexpected = name_some(key for key, reason in reasons.items() if not reason)
    return ', '.join([str(len(reasons)), *counts, *([f'unexpected: {unexpected}'] if unexpected else [])])
