"""The report of a fusion: the outcome for each norm, and the layers it was folded into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from slab_det.common.record import Record

OUTCOMES = ('folded', 'absorbed', 'affine', 'kept')


@dataclass(frozen=True)
class NormFusion(Record):
    """Outcome of the fusion of one norm.

    Attributes:
        norm: Dotted name of the norm in the model.
        kind: Class of the norm.
        outcome: 'folded' into linear layers exactly; 'absorbed' into them by a fit (:func:`slab_det.absorb`); 'affine',
            replaced by one multiply-add; or 'kept', unchanged.
        into: Names of the layers that the norm was folded into.
        side: 'input' or 'output': the side of these layers on which the norm was.
        reason: Why the norm was not folded, or ''.
    """

    norm: str
    kind: str
    outcome: Literal['folded', 'absorbed', 'affine', 'kept']
    into: tuple[str, ...] = ()
    side: Literal['input', 'output'] = 'input'
    reason: str = ''

    def __post_init__(self) -> None:
        # A config holds a list.
        object.__setattr__(self, 'into', tuple(self.into))

    def to_dict(self) -> dict[str, str | list[str]]:
        """The attributes that differ from their defaults."""
        values = {**vars(self), 'into': [*self.into]}
        return {name: value for name, value in values.items() if value not in ('', 'input', [])}


@dataclass
class FusionReport(Record):
    """Outcomes of all norms, in the order of the model's modules.

    Attributes:
        norms: One entry for each norm.
        channels: Number of hidden channels left in each unit that :func:`slab_det.absorb` pruned, by the name of the
            unit: an FFN, an attention (the channels of q, of k and of v), or a layer of a head that writes them.
    """

    norms: list[NormFusion]
    channels: dict[str, int] = field(default_factory=dict)

    def select(self, outcome: str) -> list[NormFusion]:
        """The norms with this outcome."""
        return [norm for norm in self.norms if norm.outcome == outcome]

    def to_dict(self) -> dict:
        """The number of norms with each outcome, and every norm."""
        channels = {'channels': self.channels} if self.channels else {}
        return {**self._count(), 'norms': [norm.to_dict() for norm in self.norms], **channels}

    def lines(self) -> Iterator[str]:
        counts = ', '.join(f'{count} {outcome}' for outcome, count in self._count().items())
        yield f'{len(self.norms)} norms: {counts}'
        for norm in self.norms:
            if not norm.into:
                yield f'  {norm.norm} ({norm.kind}): {norm.outcome} - {norm.reason}'
        if self.channels:
            yield f'hidden channels removed in {len(self.channels)} units'

    def _count(self) -> dict[str, int]:
        # 'absorbed' is left out at 0: only slab_det.absorb makes absorbed norms.
        return {outcome: count for outcome in OUTCOMES if (count := len(self.select(outcome))) or outcome != 'absorbed'}
