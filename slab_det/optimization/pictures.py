"""Draws the retained AP over time, and the objects that the original detector and the recommended form find."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from textwrap import fill

import matplotlib
import mmcv
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter
from pycocotools import mask as coco_mask

from slab_det.common.errors import ComparisonError
from slab_det.common.record import format_digits
from slab_det.compare.detections import Detections
from slab_det.compare.ruler import retained_ap
from slab_det.inference.forms import BASE
from slab_det.measure.figure import COLOURS, INK, WIDTH, styled

NUM_DRAWN = 5
# Classes beyond these have the colour of an earlier one.
CLASS_COLOURS = matplotlib.colormaps['tab10'].colors
MARKERS = {'float32': 'o', 'bfloat16': 's', 'float16': 's', 'int8': 'D'}
RUNTIME_COLOURS = dict(zip(('eager', 'torch', 'openvino', 'onnxruntime'), COLOURS, strict=True))
# Width and height of the panel's inside and of a number in it, in points.
PANEL, NUMBER = (470, 165), (11, 9)
# Of the panel with its labels, and of a line of the legend, in inches.
PANEL_HEIGHT, LINE_HEIGHT = 2.9, 0.17
# Letters of a line of the legend.
LABEL = 46


@styled
def loss_figure(content: Mapping) -> Figure:
    """Draws the share of the AP that each form retains over its time, numbered from the fastest.

    Horizontal lines are the quartiles of the time, vertical ones two standard errors of the share.

    Times are ratios to the original detector in the same rounds, as optimize.json has them: milliseconds of forms that
    were measured in different rounds cannot be compared. Forms that were compared on fewer detections are hollow.

    Args:
        content: What optimize.json holds.
    """
    entries = content['forms']
    base = next(entry for entry in entries if entry['key'] == BASE.key)
    labels = [_label(number, entry, content['recommended']) for number, entry in enumerate(entries, 1)]
    half = math.ceil(len(labels) / 2)
    lines = max(sum(label.count('\n') + 1 for label in column) for column in (labels[:half], labels[half:]))
    below = LINE_HEIGHT * (lines + 2)
    figure = Figure(figsize=(WIDTH, PANEL_HEIGHT + below))
    axes, legend = figure.subplots(2, 1, height_ratios=(PANEL_HEIGHT, below))
    least = 1 - content['max_loss'] / 100 / content['ap']
    # Forms that lose much more stand at the lower edge, because they would hide how the others differ; the legend has
    # their share.
    low = 1 - 3 * max(1 - least, 0.02)
    ranges = [[1 - loss / 100 / content['ap'] for loss in entry['loss_range'][::-1]] for entry in entries]
    # Standard errors of few detections may leave the panel, on both sides.
    high = max(1 - 0.15 * (low - 1), *(1.01 * entry['retained_ap'] for entry in entries))
    right = 1.06 * max(max(*entry['quartiles'], entry['ratio']) for entry in entries)
    axes.set(ylabel='AP retained', xlim=(0, right), ylim=(low, high))
    axes.set_xlabel(f'time for an image; the original detector, of {format_digits(base["median_ms"])} ms: 1')
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    # The original detector is compared with nothing.
    most = max((entry['detections'] for entry in entries if entry is not base), default=base['detections'])
    places, handles = [], []
    for entry, label, errors in zip(entries, labels, ranges, strict=True):
        time, (start, end) = entry['ratio'], entry['quartiles']
        colour, y = RUNTIME_COLOURS.get(entry['runtime'], INK), max(entry['retained_ap'], low + 0.02 * (high - low))
        is_below = entry['retained_ap'] < y
        look = dict(color=colour, mfc=colour if entry['detections'] >= most else 'white', ms=5)
        look['marker'] = 'v' if is_below else MARKERS.get(entry['precision'], 'P')
        axes.plot([start, end], [y, y], color=colour, lw=1)
        if not is_below:
            axes.plot([time, time], errors, color=colour, lw=1)
        axes.plot(time, y, ls='', zorder=3, **look)
        if entry['key'] == content['recommended']:
            axes.plot(time, y, 'o', ms=12, mfc='none', color=INK, zorder=4)
        places.append((time, y))
        label += f' ({entry["retained_ap"]:.0%} retained)' * is_below
        handles.append(Line2D([], [], ls='', label=label, **look))
    _number(axes, places)
    axes.axhline(least, color='0.5', lw=1, ls='--')
    beside = dict(xycoords=('axes fraction', 'data'), textcoords='offset points', ha='right', va='top', color='0.4')
    axes.annotate(f'below: a loss of more than {content["max_loss"]:g} AP', (1, least), xytext=(-2, -2), **beside)
    fewer = sorted({entry['detections'] for entry in entries if entry['detections'] < most})
    title = f'AP retained on {most:,} detections' + f'; hollow: on {" or ".join(f"{n:,}" for n in fewer)}' * bool(fewer)
    legend.set_axis_off()
    legend.legend(handles=handles, loc='center', ncols=2, borderaxespad=0, title=title)
    return figure


def _label(number: int, entry: Mapping, recommended: str) -> str:
    """The line of the legend for a form, or two lines."""
    is_best = entry['key'] == recommended
    what = ': recommended' if is_best else ': as fast' if entry['tie'] else ': dropped' * bool(entry['dropped_for'])
    return fill(f'{number}  {entry["title"]}{what}', LABEL, subsequent_indent='    ', break_on_hyphens=False)


def _number(axes: Axes, places: Sequence[tuple[float, float]]) -> None:
    """Numbers points, each beside its point where no other number and no other point is."""
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    points = [((x - left) / (right - left) * PANEL[0], (y - bottom) / (top - bottom) * PANEL[1]) for x, y in places]
    taken = list(points)
    for number, (place, (x, y)) in enumerate(zip(places, points, strict=True), 1):

        def crowd(offset: tuple[float, float], x: float = x, y: float = y) -> float:
            near = [(abs(x + offset[0] - u), abs(y + offset[1] - v)) for u, v in taken]
            outside = x + offset[0] < NUMBER[0] or y + offset[1] < NUMBER[1]
            # Far numbers need a line, which may cross others.
            return outside + sum(du < NUMBER[0] and dv < NUMBER[1] for du, dv in near) + math.hypot(*offset) / 1000

        dx, dy = min(_offsets(), key=crowd)
        taken.append((x + dx, y + dy))
        line = dict(arrowstyle='-', lw=0.5, color='0.5', shrinkA=0, shrinkB=2) if math.hypot(dx, dy) > 12 else None
        axes.annotate(
            str(number), place, (dx, dy), textcoords='offset points', ha='center', va='center', arrowprops=line
        )


def _offsets() -> Iterator[tuple[float, float]]:
    for radius, step in product((10, 18, 27, 36, 45), range(12)):
        angle = math.pi / 2 + math.pi / 6 * step
        yield radius * math.cos(angle), radius * math.sin(angle)


def find_least_agreeing(reference: Mapping[int, Detections], other: Mapping[int, Detections], count: int) -> list[int]:
    """The images, of those in which the first detector finds something, on which the other finds it least."""
    values = {}
    for image in sorted(reference.keys() & other.keys()):
        try:
            found = [reference[image]]
            values[image] = retained_ap(found, found, [other[image]]).value
        except ComparisonError:  # nothing is found
            continue
    return sorted(values, key=values.get)[:count]


@styled
def objects_figure(
    found: Mapping[str, Mapping[int, Detections]], images: Sequence[Path], classes: Sequence[str], score: float
) -> Figure:
    """Draws the objects of the original detector above those of the recommended form, in the least agreeing images.

    Args:
        found: The detections of both, by title, in the images by index.
        images: Files of the images.
        classes: Class names; empty if unknown.
        score: Detections with a lower score are left out, also of the comparison.
    """
    found = {
        title: {i: each.select(np.flatnonzero(each.scores >= score)) for i, each in detections.items()}
        for title, detections in found.items()
    }
    # Where both are unsure of everything, any images.
    first, other = found.values()
    indices = find_least_agreeing(first, other, NUM_DRAWN) or sorted(first.keys() & other.keys())[:NUM_DRAWN]
    pixels = [mmcv.imread(str(images[i]), channel_order='rgb') for i in indices]
    tallest = max(min(image.shape[0] / image.shape[1], 1.5) for image in pixels)
    figure = Figure(figsize=(WIDTH, 2 * (WIDTH / NUM_DRAWN * tallest + 0.4) + 0.5))
    parts, labels = figure.subfigures(2, 1), set()
    for part, (title, detections) in zip(parts, found.items(), strict=True):
        part.suptitle(title, x=0.01, ha='left')
        rows = part.subplots(1, NUM_DRAWN)
        for axes in rows:
            axes.set_axis_off()
        for axes, index, image in zip(rows, indices, pixels, strict=False):
            labels |= _draw(axes, image, detections[index])
    names = [classes[label] if label < len(classes) else f'class {label}' for label in sorted(labels)][
        : len(CLASS_COLOURS)
    ]
    handles = [
        Line2D([], [], color=_colour(label), label=name) for label, name in zip(sorted(labels), names, strict=False)
    ]
    if handles:
        figure.legend(handles=handles, loc='outside lower center', ncols=5)
    return figure


def _colour(label: int) -> tuple[float, ...]:
    return CLASS_COLOURS[label % len(CLASS_COLOURS)]


def _draw(axes: Axes, image: np.ndarray, found: Detections) -> set[int]:
    """Draws an image (H, W, 3) with its objects, and returns their classes."""
    axes.imshow(image)
    count = len(found.scores)
    axes.set_title(f'{count} object{"s" if count != 1 else ""}')
    boxes = found.regions
    if isinstance(found.regions, list):
        boxes = coco_mask.toBbox(found.regions) if found.regions else []
        for mask, label in zip(found.regions, found.labels, strict=True):
            axes.contour(coco_mask.decode(mask), [0.5], colors=[_colour(label)], linewidths=1)
    for (x, y, width, height), label in zip(boxes, found.labels, strict=True):
        axes.add_patch(Rectangle((x, y), width, height, fill=False, lw=1, ec=_colour(label)))
    axes.set(xlim=(0, image.shape[1]), ylim=(image.shape[0], 0))
    return {*found.labels.tolist()}
