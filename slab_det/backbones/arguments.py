"""Checks arguments of backbones: values for each stage, whole numbers, names of attentions."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from numbers import Integral


def check_whole(name: str, value: object, least: int = 1) -> None:
    """Raises ValueError unless ``value``, one number or several, holds whole numbers from ``least`` on."""
    for number in value if isinstance(value, Sequence) else (value,):
        if not isinstance(number, Integral) or isinstance(number, bool) or number < least:
            raise ValueError(f'{name}={value!r}: give whole numbers from {least} on')


def count_stages(depths: Sequence[int]) -> int:
    """The number of stages of a backbone whose ``depths`` hold the blocks of each; ValueError if they do not."""
    if not isinstance(depths, Sequence) or not depths:
        raise ValueError(f'depths={depths!r}: give the number of blocks of each stage, such as (2, 2, 6, 2)')
    check_whole('depths', depths, 0)
    return len(depths)


def find_attention(word: str, known: dict[str, type]) -> type:
    """The attention that a word of a config names in a table of :mod:`slab_det.attention`; ValueError for others."""
    if not isinstance(word, str) or word not in known:
        raise ValueError(f'unknown attention {word!r}: choose from {", ".join(known)}')
    return known[word]


class PerStage:
    """Spreads arguments of a backbone over its stages.

    Args:
        backbone: The class, whose defaults may have more values than a smaller model has stages.
        num_stages: The number of stages.
    """

    def __init__(self, backbone: type, num_stages: int) -> None:
        self.num_stages = num_stages
        self.defaults = {name: part.default for name, part in inspect.signature(backbone).parameters.items()}

    def values(self, name: str, value: object) -> tuple:
        """One value for each stage: a sequence as it is, anything else repeated.

        Raises:
            ValueError: If the sequence has another length.
        """
        if isinstance(value, str) or not isinstance(value, Sequence):
            return (value,) * self.num_stages
        default = self.defaults[name]
        if isinstance(default, Sequence) and [*value] == [*default]:
            value = value[: self.num_stages]
        if len(value) != self.num_stages:
            raise ValueError(f'{name}={value} has {len(value)} values for {self.num_stages} stages: give one for each')
        return tuple(value)

    def numbers(self, name: str, value: object, least: int = 1) -> tuple[int, ...]:
        """As :meth:`values`, for whole numbers from ``least`` on; ValueError for others."""
        values = self.values(name, value)
        check_whole(name, values, least)
        return values
