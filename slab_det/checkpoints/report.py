"""LoadReport: which weights of a checkpoint were loaded, converted, missing or unused."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from slab_det.runtime.errors import name_some


@dataclass
class LoadReport:
    """What happened to every key of the model and of the checkpoint.

    Attributes:
        source: The file, or a word for what was given instead.
        format: The layout that was found.
        matched: Keys of the model that were filled.
        converted: Matched keys whose values were changed on the way, and how.
        missing_expected: Keys of the model that the checkpoint need not hold, and why.
        missing_unexpected: Keys of the model that keep their initial values although they should not.
        unused_expected: Keys of the checkpoint that the model has no use for, and why.
        unused_unexpected: Keys of the checkpoint that should have had a place in the model.
        gammas: gamma of every PRepBN that the checkpoint decides.
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

    @property
    def complete(self) -> bool:
        """Whether nothing is missing or unused that should not be."""
        return not self.missing_unexpected and not self.unused_unexpected

    def __str__(self) -> str:
        rows = {
            'matched': str(len(self.matched)),
            '  converted': _count_reasons(self.converted),
            'missing, expected': _count_reasons(self.missing_expected),
            'missing': f'{len(self.missing_unexpected)} {name_some(self.missing_unexpected)}',
            'unused, expected': _count_reasons(self.unused_expected),
            'unused': f'{len(self.unused_unexpected)} {name_some(self.unused_unexpected)}',
        }
        if self.gammas:
            counts = sorted(Counter(self.gammas.values()).items())
            rows['gamma'] = ', '.join(f'{gamma:g} in {count} norms' for gamma, count in counts)
        return '\n'.join([f'{self.source} ({self.format})', *(f'  {name:<18} {text}' for name, text in rows.items())])


def _count_reasons(reasons: dict[str, str]) -> str:
    counts = Counter(reasons.values()).items()
    return f'{len(reasons)} ' + ', '.join(f'{reason} ({count})' for reason, count in counts)
