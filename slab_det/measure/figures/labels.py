"""Writes labels beside their points where they hide neither points nor each other."""

import math
import textwrap
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

FONT_SIZE = 8  # points; smaller is not read in print
# Where the foot of a label may be, in points from its marker: the nearest first, and the right before the left.
_OFFSETS = sorted(
    product((7, 0, -7, 20, -20), (2, -5, -12, 6, -18, 18, -28, 30, -40)),
    key=lambda offset: math.hypot(offset[0], offset[1] + 5) + 2 * (offset[0] <= 0),
)
_ALIGNMENTS = {1: 'left', 0: 'center', -1: 'right'}
_NEAR = 20  # So many of them are close enough to leave no doubt which marker is meant.


class Label(NamedTuple):
    """A text and the point, in data coordinates, that it belongs to."""

    text: str
    point: tuple[float, float]


class Panel(NamedTuple):
    """Axes and what lies in them, in data coordinates.

    Attributes:
        axes: Their limits must be final.
        labels: In order of importance: the first ones get the best places.
        points: Markers, which no label may cover.
        lines: Pairs of ends; labels keep off them where there is room.
    """

    axes: Axes
    labels: list[Label]
    points: list[tuple[float, float]]
    lines: list[tuple[tuple[float, float], tuple[float, float]]]


def wrap(text: str, width: int) -> str:
    """As few lines of at most ``width`` characters as there must be, and all of about one length."""

    def lines(limit: int) -> list[str]:
        return textwrap.wrap(text, limit, break_on_hyphens=False)

    fewest = len(lines(width))
    return '\n'.join(next(found for limit in range(width) if len(found := lines(limit + 1)) == fewest))


def place_labels(panel: Panel) -> None:
    """Writes each label at the first offset where it covers nothing; in black, as colours fade in print.

    The figure must have been laid out before: without, text has no extent and data no pixels.
    """
    axes = panel.axes
    renderer = axes.figure.canvas.get_renderer()
    frame = axes.get_window_extent(renderer)
    taken = _squares(_to_pixels(axes, panel.points), 6 * axes.figure.dpi / 72)
    lines = np.concatenate([np.empty((0, 2)), *(_along(_to_pixels(axes, line)) for line in panel.lines)])
    strokes = _squares(lines, 1)
    for text, point in panel.labels:
        label = axes.annotate(
            text, point, (0, 0), textcoords='offset points', va='bottom', fontsize=FONT_SIZE, zorder=4
        )
        label.set_path_effects([withStroke(linewidth=2, foreground='white')])  # Legible across a line.
        # Labels float over the panel: they must not make the layout shrink it.
        label.set_in_layout(False)
        extent = label.get_window_extent(renderer)
        boxes = {offset: _box(extent, offset, axes.figure.dpi / 72) for offset in _OFFSETS}
        free = [offset for offset, box in boxes.items() if _contains(frame, box) and not _hits(box, taken)]
        # A place across a line, close by, is better than a clear one that could be another marker's.
        clear = [offset for offset in free if offset in _OFFSETS[:_NEAR] and not _hits(boxes[offset], strokes)]
        best = (clear or free or _OFFSETS)[0]
        label.set_position(best)
        label.set_horizontalalignment(_ALIGNMENTS[np.sign(best[0])])
        taken = np.concatenate([taken, boxes[best][None]])


def _to_pixels(axes: Axes, points: Sequence[tuple[float, float]]) -> np.ndarray:
    return axes.transData.transform(np.reshape(points, (-1, 2)))


def _along(ends: np.ndarray) -> np.ndarray:
    """Points of a line, at most 3 pixels apart."""
    steps = max(2, math.ceil(math.dist(*ends) / 3) + 1)
    return ends[0] + np.linspace(0, 1, steps)[:, None] * (ends[1] - ends[0])


def _squares(points: np.ndarray, radius: float) -> np.ndarray:
    """(n, 4): x0, y0, x1, y1."""
    return np.concatenate([points - radius, points + radius], 1)


def _box(extent: Bbox, offset: tuple[float, float], scale: float) -> np.ndarray:
    """Where a text that has this extent at offset 0, left-aligned, lies at another offset; as in _squares."""
    x = extent.x0 + offset[0] * scale - {1: 0, 0: 0.5, -1: 1}[np.sign(offset[0])] * extent.width
    y = extent.y0 + offset[1] * scale
    return np.array([x, y, x + extent.width, y + extent.height])


def _contains(frame: Bbox, box: np.ndarray) -> bool:
    return frame.x0 <= box[0] and box[2] <= frame.x1 and frame.y0 <= box[1] and box[3] <= frame.y1


def _hits(box: np.ndarray, others: np.ndarray) -> bool:
    return bool(((box[:2] < others[:, 2:]) & (others[:, :2] < box[2:])).all(1).any())
