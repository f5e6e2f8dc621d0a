"""What became of every norm in a fused model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class NormFate:
    """What became of one norm.

    Attributes:
        norm: Its dotted name in the model.
        kind: Its class.
        fate: 'folded' into a neighbour; left as one 'affine' multiply-add; or 'kept' as it was.
        into: The layers it was folded into, separated by commas, or ''.
        side: Whether the norm stood at the 'input' or at the 'output' of these layers.
        reason: Why it was not folded, or ''.
    """

    norm: str
    kind: str
    fate: Literal['folded', 'affine', 'kept']
    into: str = ''
    side: Literal['input', 'output'] = 'input'
    reason: str = ''

    def to_dict(self) -> dict[str, str]:
        """The attributes that differ from their defaults."""
        return {name: value for name, value in vars(self).items() if value not in ('', 'input')}


@dataclass
class FusionReport:
    """The fate of every norm, in the order of the model's modules."""

    norms: list[NormFate]

    def select(self, fate: str) -> list[NormFate]:
        """The norms with this fate."""
        return [norm for norm in self.norms if norm.fate == fate]

    def to_dict(self) -> dict:
        """The number of norms of each fate, and every norm."""
        counts = {fate: len(self.select(fate)) for fate in ('folded', 'affine', 'kept')}
        return {**counts, 'norms': [norm.to_dict() for norm in self.norms]}

    def __str__(self) -> str:
        counts = ', '.join(f'{len(self.select(fate))} {fate}' for fate in ('folded', 'affine', 'kept'))
        left = [f'  {norm.norm} ({norm.kind}): {norm.fate} - {norm.reason}' for norm in self.norms if not norm.into]
        return '\n'.join([f'{len(self.norms)} norms: {counts}', *left])
