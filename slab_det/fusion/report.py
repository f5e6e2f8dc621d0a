"""What became of every norm in a fused model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

OUTCOMES = ('folded', 'absorbed', 'affine', 'kept')


@dataclass(frozen=True)
class NormFusion:
    """What became of one norm.

    Attributes:
        norm: Dotted name of the norm in the model.
        kind: Class of the norm.
        outcome: 'folded' into linear layers; 'absorbed' by them (:func:`slab_det.absorb`); 'affine', one multiply-add;
            or 'kept' as it was.
        into: Names of the layers that took it, separated by commas, or ''.
        side: Whether the norm stood at the 'input' or at the 'output' of these layers.
        reason: Why no layer took it, or ''.
    """

    norm: str
    kind: str
    outcome: Literal['folded', 'absorbed', 'affine', 'kept']
    into: str = ''
    side: Literal['input', 'output'] = 'input'
    reason: str = ''

    def to_dict(self) -> dict[str, str]:
        """The attributes that differ from their defaults."""
        return {name: value for name, value in vars(self).items() if value not in ('', 'input')}


@dataclass
class FusionReport:
    """What became of every norm, in the order of the model's modules.

    Attributes:
        norms: One entry for each norm.
        ffns: Hidden channels that :func:`slab_det.absorb` left in each FFN that it pruned, by the name of the FFN.
    """

    norms: list[NormFusion]
    ffns: dict[str, int] = field(default_factory=dict)

    def select(self, outcome: str) -> list[NormFusion]:
        """The norms with this outcome."""
        return [norm for norm in self.norms if norm.outcome == outcome]

    def to_dict(self) -> dict:
        """The number of norms with each outcome, and every norm."""
        ffns = {'ffns': self.ffns} if self.ffns else {}
        return {**self._count(), 'norms': [norm.to_dict() for norm in self.norms], **ffns}

    def __str__(self) -> str:
        counts = ', '.join(f'{count} {outcome}' for outcome, count in self._count().items())
        left = [f'  {norm.norm} ({norm.kind}): {norm.outcome} - {norm.reason}' for norm in self.norms if not norm.into]
        pruned = [f'{len(self.ffns)} FFNs pruned'] if self.ffns else []
        return '\n'.join([f'{len(self.norms)} norms: {counts}', *left, *pruned])

    def _count(self) -> dict[str, int]:
        # Only models of slab_det.absorb have absorbed norms.
        return {outcome: count for outcome in OUTCOMES if (count := len(self.select(outcome))) or outcome != 'absorbed'}
