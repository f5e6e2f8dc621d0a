"""LoadReport: what came of a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class LoadReport:
    """Every key of the model and of the checkpoint, and what became of it.

    Attributes:
        source: The file, or a word for what was given instead.
        format: The layout that was found.
        matched: Keys of the model that were filled.
        converted: Those of them whose values were changed on the way, and how.
        missing_expected: Keys of the model that the checkpoint need not hold, and why.
        missing_unexpected: Keys of the model that keep their initial values although they should not.
        unused_expected: Keys of the checkpoint that the model has no use for, and why.
        unused_unexpected: Keys of the checkpoint that should have had a place in the model.
        gammas: gamma of every PRepBN that the checkpoint decides.
        notes: What to know about the result.
    """

    source: str
    format: str = ''
    matched: list[str] = field(default_factory=list)
    converted: dict[str, str] = field(default_factory=dict)
    missing_expected: dict[str, str] = field(default_factory=dict)
    missing_unexpected: list[str] = field(default_factory=list)
    unused_expected: dict[str, str] = field(default_factory=dict)
    unused_unexpected: list[str] = field(default_factory=list)
    gammas: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing or unused that should not be."""
        return not self.missing_unexpected and not self.unused_unexpected

    def __str__(self) -> str:
        rows = [
            ('matched', f'{len(self.matched)}'),
            ('  converted', _by_reason(self.converted)),
            ('missing, expected', _by_reason(self.missing_expected)),
            ('missing', _some(self.missing_unexpected)),
            ('unused, expected', _by_reason(self.unused_expected)),
            ('unused', _some(self.unused_unexpected)),
        ]
        if self.gammas:
            counts = Counter(self.gammas.values())
            rows.append(('gamma', ', '.join(f'{gamma:g} in {counts[gamma]} norms' for gamma in sorted(counts))))
        rows += [('note', note) for note in self.notes]
        table = '\n'.join(f'  {name:<18} {value}' for name, value in rows)
        return f'{self.source} ({self.format})\n{table}'


def _some(keys: Iterable[str], limit: int = 4) -> str:
    """How many keys, and the first few."""
    keys = list(keys)
    if not keys:
        return '0'
    return f'{len(keys)}: {name_some(keys, limit)}'


def name_some(keys: Iterable[str], limit: int = 4) -> str:
    """The first few keys."""
    keys = list(keys)
    return ', '.join(keys[:limit]) + (', …' if len(keys) > limit else '')


def _by_reason(reasons: dict[str, str]) -> str:
    counts = Counter(reasons.values())
    total = f'{len(reasons)}'
    return f'{total}: ' + ', '.join(f'{reason} ({count})' for reason, count in counts.items()) if counts else total
