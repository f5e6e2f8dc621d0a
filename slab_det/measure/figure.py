"""Draws AP over latency (SLAB, Guo et al., ICML 2024, Figure 5), and sets the style of all figures."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from slab_det.common.errors import SlabDetError
from slab_det.measure.report_file import AP_KINDS, ReportEntry, ap_scope, latency_scope, main_column, measured_kinds

WIDTH = 7.2  # inches: the text width of A4
INK = '#000000'
# The colours of Okabe and Ito that also differ in greyscale, darkest first.
COLOURS = (INK, '#0072B2', '#D55E00', '#56B4E9')
MARKS = cycler(marker=('o', 's', 'D', '^', 'v')) * cycler(color=COLOURS)
# A decorator for every function that draws or writes a picture.
styled = rc_context(
    {
        'axes.axisbelow': True,
        'axes.grid': True,
        'axes.spines.right': False,
        'axes.spines.top': False,
        'axes.titlesize': 8,
        'figure.constrained_layout.use': True,
        'figure.dpi': 200,  # for PNG, and for raster images inside SVG
        'figure.titlesize': 8,
        'font.size': 8,  # points; smaller text cannot be read in print
        'grid.color': '0.9',
        'legend.frameon': False,
        'svg.fonttype': 'none',  # text, not outlines: a fifth of the size
        'svg.hashsalt': 'slab_det',  # the same picture has the same bytes
    }
)


@styled
def save_figure(figure: Figure, path: str | Path, kind: str = '') -> None:
    """Writes a picture in the format ``kind``, such as 'svg', or that its suffix names; the folder need not exist."""
    path = Path(path)
    kind = kind or path.suffix[1:]
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format=kind, metadata={'Date': None} if kind == 'svg' else None)


@styled
def ap_latency_figure(entries: Sequence[ReportEntry]) -> Figure:
    """Draws box and mask AP, or accuracy (times 100), over median latency.

    Hollow markers are unfused models, filled markers are fused ones, and an arrow leads from unfused to fused. Entries
    that differ in detector, data, training or latency conditions cannot be compared and get separate panels.

    Args:
        entries: Report entries; entries without AP or latency are left out.

    Raises:
        SlabDetError: If no entry has both AP and latency.
    """
    groups: dict[tuple[str, str, str], list[ReportEntry]] = {}
    for entry in entries:
        if entry.ap and entry.latency:
            groups.setdefault((entry.detector, latency_scope(entry), ap_scope(entry)), []).append(entry)
    if not groups:
        raise SlabDetError('no entry has both AP and latency: run slab-det test --latency first')
    figure = Figure(figsize=(WIDTH, 3.4 * len(groups)))
    parts = figure.subfigures(len(groups), 1, squeeze=False)[:, 0]
    for part, ((detector, latency, data), shown) in zip(parts, groups.items(), strict=True):
        kinds = measured_kinds(shown)
        # The key of a cache folder says nothing to a reader.
        data = re.sub(r'-[0-9a-f]{8,}(?=/)', '', data)
        lines = (f'{detector}, measured on {data}', f'ms: median latency, {latency}; filled: fused')
        part.suptitle('\n'.join(textwrap.fill(line, 110) for line in lines))
        looks = dict(zip(dict.fromkeys(entry.name for entry in shown), MARKS(), strict=False))
        for axes, kind in zip(part.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
            _draw_panel(axes, [entry for entry in shown if kind in entry.ap], kind, looks)
        handles = [Line2D([], [], ls='', label=textwrap.fill(name, 45), **look) for name, look in looks.items()]
        part.legend(handles=handles, loc='outside lower center', ncols=2)
    return figure


def _draw_panel(axes: Axes, entries: Sequence[ReportEntry], kind: str, looks: Mapping[str, Mapping]) -> None:
    """Draws one kind of AP over latency; ``looks`` maps each name to its marker and colour."""
    points: dict[tuple[str, str], tuple[float, float]] = {}
    for entry in entries:
        point = (entry.latency['median_ms'], 100 * entry.ap[kind][main_column(kind)])
        look, fused = looks[entry.name], entry.variant == 'fused'
        axes.plot(*point, linestyle='', zorder=3, mfc=look['color'] if fused else 'white', **look)
        points[entry.name, entry.variant] = point
    for name in looks:
        ends = [points.get((name, variant)) for variant in ('fused', 'unfused')]
        if None not in ends:
            axes.annotate('', *ends, arrowprops={'arrowstyle': '->', 'shrinkA': 5, 'shrinkB': 5})
    times, ap = zip(*points.values(), strict=True)
    # Narrower axes would magnify the noise between two runs.
    axes.set(xlabel='ms', ylabel=AP_KINDS[kind], xlim=limits(times, 0.2 * max(times)), ylim=limits(ap, 4.0, 100))


def limits(values: Sequence[float], min_span: float, most: float = np.inf) -> tuple[float, float]:
    """Returns the range of an axis: the values with a margin, at least ``min_span`` long, within 0 and ``most``."""
    low, high = min(values), max(values)
    room = max(0.15 * (high - low), (min_span - (high - low)) / 2)
    return max(low - room, 0), min(high + room, most)
