"""Weight: a tensor on its way from a file into a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor of a checkpoint and what has happened to it.

    Attributes:
        value: The tensor.
        key: Its name in the file.
        change: How its values differ from the file's; empty if only its name does.
    """

    value: Tensor
    key: str
    change: str = ''

    def changed(self, value: Tensor, change: str) -> Weight:
        """This weight with other values and the reason for them."""
        return replace(self, value=value, change=f'{self.change}, {change}' if self.change else change)


Weights = dict[str, Weight]


class CheckpointFormat(NamedTuple):
    """A layout of checkpoints.

    Attributes:
        name: What ``source`` and the report call it.
        matches: Whether a file with these keys has the layout.
        convert: Gives weights the names and the channel order of our own layout. Norms keep their kind.
        notes: What to know about converted weights of this layout in a model.
    """

    name: str
    matches: Callable[[set[str]], bool]
    convert: Callable[[Weights], Weights]
    notes: Callable[[nn.Module, Weights], list[str]] = lambda model, weights: []
