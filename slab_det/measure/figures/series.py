"""Which models one line joins, and how that line looks."""

import re
from collections.abc import Sequence
from typing import NamedTuple

# What slab_det.measure.reporting.describe_model and the papers' tables call a row: 'SLAB-Swin-T', 'PVT-S-PRepBN', …
_ROW = re.compile(
    r'(?:(?P<attention>SLAB|SLA|Flatten)-)?(?P<family>Swin|PVTv2|PVT)-(?P<size>[TSMBL]|B\d|\d+x\d+)(?:-(?P<norm>.+))?'
)
_ATTENTIONS = {None: 'softmax', 'SLAB': 'SLA', 'SLA': 'SLA', 'Flatten': 'focused'}


class ModelName(NamedTuple):
    """A row label, taken apart.

    Attributes:
        label: The whole of it.
        series: The label without the size: what the sizes of one architecture share. 'SLAB-Swin'.
        size: 'T', 'S', …, or width and depths; the whole label where it has no size.
        title: The series, with norm and attention where it does not say them.
    """

    label: str
    series: str
    size: str
    title: str


class Style(NamedTuple):
    """How a series is drawn. In black and white the marker and the dashes still tell it from the others."""

    colour: str
    marker: str
    dashes: str | tuple[int, tuple[int, ...]]


# Okabe and Ito's colours, but for yellow: told apart by colour-blind readers.
_COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#E69F00', '#000000')
_MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '*')
# The three numbers share no factor: 40 series before marker and dashes repeat, and points without a line differ in
# colour or marker for 56.
_DASHES = ('-', (0, (5, 2)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (9, 3)))


def parse_name(name: str) -> ModelName:
    """Takes a row label apart; one that is not built as the papers' labels is a series of its own."""
    found = _ROW.fullmatch(name)
    if found is None:
        return ModelName(name, name, name, name)
    attention, family, size, norm = found.group('attention', 'family', 'size', 'norm')
    series = '-'.join(part for part in (attention, family, norm) if part)
    unsaid = [] if norm else ['PRepBN' if attention == 'SLAB' else 'LN']
    return ModelName(name, series, size, f'{series} ({", ".join([*unsaid, _ATTENTIONS[attention]])})')


def style_of(series: str, among: Sequence[str]) -> Style:
    """The style of a series, by its place among all that one figure shows."""
    index = among.index(series)
    return Style(_COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)], _DASHES[index % len(_DASHES)])
