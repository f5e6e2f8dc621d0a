"""AP over latency (SLAB, Guo et al., ICML 2024, Figure 5), readable when printed in black and white.

Nothing is compared that was not measured alike: entries that share detector, data, training and latency scope stand in
one row of panels.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from slab_det.measure.report import AP_KINDS, ReportEntry, ap_scope, latency_scope
from slab_det.runtime.errors import ReportError

WIDTH = 7.2  # inches: the text width of A4
FONT_SIZE = 8  # points; smaller is not read in print
# Okabe and Ito's colours without yellow, which colour-blind readers tell apart. Seven colours and twelve markers share
# no factor: 84 models differ in one of them.
COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#E69F00', '#000000')
_MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '*', '<', '>', 'p', 'h')
# Narrower axes would blow the difference of two runs up to the size of the panel.
_MIN_AP_SPAN = 4.0
_MIN_MS_SPAN = 0.2  # share of the largest latency


def draw_ap_latency(entries: Sequence[ReportEntry], path: str | Path) -> None:
    """Draws box and mask AP (times 100) over median latency to a PNG.

    Hollow markers are unfused, filled ones fused, and an arrow leads from one to the other. A model whose AP was not
    measured stands as a vertical line at its latency.

    Args:
        entries: Rows; those without latency are left out.
        path: The PNG to write.

    Raises:
        ReportError: If no entry has both AP and latency.
    """
    figure = ap_latency_figure(entries)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def ap_latency_figure(entries: Sequence[ReportEntry]) -> Figure:
    """The picture of :func:`draw_ap_latency`, not yet written."""
    timed = [entry for entry in entries if entry.latency]
    rows = list(dict.fromkeys((e.detector, latency_scope(e), ap_scope(e)) for e in timed if e.ap))
    if not rows:
        raise ReportError('no entry has both AP and latency: run tools/test.py with --latency first')
    looks = {
        name: (COLOURS[i % len(COLOURS)], _MARKERS[i % len(_MARKERS)])
        for i, name in enumerate(dict.fromkeys(entry.name for entry in timed))
    }
    legend = _legend(timed, looks)
    columns = max(1, min(4, 110 // (8 + max(len(handle.get_label()) for handle in legend))))
    legend_height = 0.2 * -(-len(legend) // columns) + 0.2
    figure = Figure(figsize=(WIDTH, 3.4 * len(rows) + legend_height), dpi=200, layout='constrained')
    FigureCanvasAgg(figure)
    figure.legend(handles=legend, loc='outside lower center', ncols=columns, fontsize=FONT_SIZE, frameon=False)
    for part, (detector, latency, scope) in zip(
        figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True
    ):
        part.suptitle(textwrap.fill(f'{detector}, AP on {scope}', 105), fontsize=FONT_SIZE)
        part.supxlabel(textwrap.fill(f'median latency (ms): {latency}', 105), fontsize=FONT_SIZE)
        measured = [e for e in timed if (e.detector, latency_scope(e)) == (detector, latency)]
        shown = [e for e in measured if not e.ap or ap_scope(e) == scope]
        kinds = [kind for kind in AP_KINDS if any(kind in (entry.ap or {}) for entry in shown)]
        for axes, kind in zip(part.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
            _draw_panel(axes, shown, kind, looks)
    return figure


def _draw_panel(axes: Axes, entries: Sequence[ReportEntry], kind: str, looks: dict[str, tuple[str, str]]) -> None:
    times = [entry.latency['median_ms'] for entry in entries]
    axes.set_xlim(_limits(times, _MIN_MS_SPAN * max(times)))
    axes.set_ylim(_limits([100 * e.ap[kind]['AP'] for e in entries if kind in (e.ap or {})], _MIN_AP_SPAN))
    axes.set_ylabel(f'{AP_KINDS[kind]} AP', fontsize=FONT_SIZE)
    axes.tick_params(labelsize=FONT_SIZE)
    axes.grid(color='0.9', linewidth=0.6)
    axes.set_axisbelow(True)
    for name in dict.fromkeys(entry.name for entry in entries):
        colour, marker = looks[name]
        places, variants = [], []
        # Unfused before fused: the arrow's direction.
        for entry in sorted((e for e in entries if e.name == name), key=lambda e: e.variant, reverse=True):
            ms = entry.latency['median_ms']
            if not entry.ap:
                axes.axvline(ms, color=colour, linestyle='--', linewidth=1.2)
            elif kind in entry.ap:
                places.append((ms, 100 * entry.ap[kind]['AP']))
                variants.append(entry.variant)
                face = 'white' if entry.variant == 'unfused' else colour
                axes.plot(*places[-1], marker, ms=7, mew=1.4, zorder=3, mec=colour, mfc=face)
        if variants == ['unfused', 'fused']:
            arrow = {'arrowstyle': '->', 'color': colour, 'shrinkA': 5, 'shrinkB': 5}
            axes.annotate('', places[1], places[0], arrowprops=arrow)


def _legend(entries: Sequence[ReportEntry], looks: dict[str, tuple[str, str]]) -> list[Line2D]:
    """One handle per model, then one per variant."""
    handles = []
    with_ap = {entry.name for entry in entries if entry.ap}
    for name, (colour, marker) in looks.items():
        if name in with_ap:
            handles.append(Line2D([], [], color=colour, marker=marker, linestyle='', label=name))
        else:
            handles.append(Line2D([], [], color=colour, linestyle='--', label=f'{name}: AP not measured'))
    for variant in dict.fromkeys(entry.variant for entry in entries if entry.ap):
        face = 'white' if variant == 'unfused' else '0.55'
        handles.append(Line2D([], [], marker='o', linestyle='', mew=1.4, mec='0.55', mfc=face, label=variant))
    return handles


def _limits(values: Sequence[float], min_span: float) -> tuple[float, float]:
    """The range of the values, none of them negative, with room around them."""
    low, high = min(values), max(values)
    room = max(0.15 * (high - low), (min_span - (high - low)) / 2)
    return max(low - room, -0.1 * min_span), high + room
