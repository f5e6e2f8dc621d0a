"""AP over latency (SLAB, Guo et al., ICML 2024, Figure 5), readable when printed in black and white.

Nothing is compared that was not measured alike: entries that share detector, data, training and latency scope stand in
one row of panels, and the published points of a paper stand in a grey row of their own.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D

from slab_det.measure.report import AP_KINDS, PaperTable, ReportEntry, ap_scope, latency_scope
from slab_det.runtime.errors import ReportError

_WIDTH = 7.2  # inches: the text width of A4
_FONT_SIZE = 8  # points; smaller is not read in print
_GREY = '#707070'
# Okabe and Ito's colours without yellow, which colour-blind readers tell apart. Seven colours and twelve markers share
# no factor: 84 models differ in one of them.
_COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#E69F00', '#000000')
_MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X', '*', '<', '>', 'p', 'h')
# Narrower axes would blow the difference of two runs up to the size of the panel.
_MIN_AP_SPAN = 4.0
_MIN_MS_SPAN = 0.2  # share of the largest latency
# Forms in which one model is run; they may be compared in one panel.
_FORMS = {
    'deployed': 'deployed',
    'compile_mode': 'torch.compile',
    'channels_last': 'channels_last',
    'autocast': 'autocast',
}


class Point(NamedTuple):
    """One measured or published detector.

    Attributes:
        name: Its row label.
        ms: Latency in milliseconds.
        ap: AP times 100 by kind, 'bbox' and 'segm'; empty where it was not measured.
        variant: 'unfused' or 'fused'; empty in papers.
        form: How it was run: '', 'deployed', 'torch.compile', …
    """

    name: str
    ms: float
    ap: Mapping[str, float]
    variant: str = ''
    form: str = ''

    @property
    def series(self) -> str:
        """The label without the size, which all sizes of one architecture share: 'SLAB-Swin'."""
        return re.sub(r'-([TSMBL]|\d+x\d+)(?=-|$)', '', self.name, count=1)


@dataclass(frozen=True)
class PanelRow:
    """Panels of what may be compared, one per kind of AP."""

    title: str
    latency: str
    points: list[Point] = field(default_factory=list)
    published: bool = False


def draw_ap_latency(entries: Sequence[ReportEntry], path: str | Path, paper_tables: Sequence[PaperTable] = ()) -> None:
    """Draws box and mask AP (times 100) over median latency to a PNG.

    Hollow markers are unfused, filled ones fused, those with a black edge are also deployed or compiled, and arrows
    lead from one form of a model to the next. A dotted line joins the sizes of one architecture. A model whose AP was
    not measured stands as a vertical line at its latency.

    Args:
        entries: Rows; those without latency are left out.
        path: The PNG to write.
        paper_tables: Published tables; those that have a latency for the same detector are drawn in grey, over their
            own latency axis.

    Raises:
        ReportError: If no entry has both AP and latency.
    """
    figure = ap_latency_figure(entries, paper_tables)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def ap_latency_figure(entries: Sequence[ReportEntry], paper_tables: Sequence[PaperTable] = ()) -> Figure:
    """The picture of :func:`draw_ap_latency`, not yet written."""
    rows = _measured_rows(entries)
    if not rows:
        raise ReportError('no entry has both AP and latency: run tools/test.py with --latency first')
    detectors = {entry.detector for entry in entries}
    rows += [_paper_row(table) for table in paper_tables if table.latency and table.detector in detectors]
    models = list(dict.fromkeys(point.name for row in rows for point in row.points))
    legend = _legend(rows, models)
    columns = max(1, min(4, 110 // (8 + max(len(handle.get_label()) for handle in legend))))
    legend_height = 0.2 * -(-len(legend) // columns) + 0.2
    figure = Figure(figsize=(_WIDTH, 3.4 * len(rows) + legend_height), dpi=200, layout='constrained')
    FigureCanvasAgg(figure)
    figure.legend(handles=legend, loc='outside lower center', ncols=columns, fontsize=_FONT_SIZE, frameon=False)
    for part, row in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        _draw_row(part, row, models)
    return figure


def _measured_rows(entries: Iterable[ReportEntry]) -> list[PanelRow]:
    """One row of panels for each set of entries that may be compared and of which one has AP."""
    timed = [entry for entry in entries if entry.latency]
    groups: dict[tuple[str, str, str], list[ReportEntry]] = {}
    for entry in timed:
        if entry.ap:
            groups.setdefault((*_conditions(entry), _ap_scope_of_any_seed(entry)), []).append(entry)
    rows = []
    for (detector, latency, scope), members in groups.items():
        without_ap = [entry for entry in timed if not entry.ap and _conditions(entry) == (detector, latency)]
        seeds = sorted({str(entry.training['seed']) for entry in members if 'seed' in (entry.training or {})})
        title = f'{detector}, AP on {scope}' + (f', seed{"s" * (len(seeds) > 1)} {", ".join(seeds)}' if seeds else '')
        points = [_point(entry) for entry in (*members, *without_ap)]
        rows.append(PanelRow(title, f'median latency (ms): {latency}', points))
    return rows


def _paper_row(table: PaperTable) -> PanelRow:
    title = f'published, not measured here: {table.source}, {table.detector}, {table.epochs} epochs, COCO val2017'
    points = []
    for name, row in table.rows.items():
        ap = {kind: row[column][0] for kind, column in AP_KINDS.items() if row[column]}
        points.append(Point(name, row['ms'], ap))
    return PanelRow(title, f'latency (ms): {table.latency}', points, published=True)


def _conditions(entry: ReportEntry) -> tuple[str, str]:
    """Detector and latency scope, whatever the form."""
    return entry.detector, latency_scope(replace(entry, latency={**entry.latency, **dict.fromkeys(_FORMS)}))


def _ap_scope_of_any_seed(entry: ReportEntry) -> str:
    """Data and training without the seed: seeds may be compared, and are named all together."""
    training = {key: value for key, value in (entry.training or {}).items() if key != 'seed' and value is not None}
    return ap_scope(replace(entry, training=training))


def _point(entry: ReportEntry) -> Point:
    form = ', '.join(text for flag, text in _FORMS.items() if entry.latency.get(flag))
    ap = {kind: 100 * values['AP'] for kind, values in (entry.ap or {}).items()}
    return Point(entry.name, entry.latency['median_ms'], ap, entry.variant, form)


def _draw_row(figure: SubFigure, row: PanelRow, models: Sequence[str]) -> None:
    colour = _GREY if row.published else 'black'
    figure.suptitle(textwrap.fill(row.title, 105), fontsize=_FONT_SIZE, color=colour)
    figure.supxlabel(textwrap.fill(row.latency, 105), fontsize=_FONT_SIZE, color=colour)
    kinds = [kind for kind in AP_KINDS if any(kind in point.ap for point in row.points)]
    for axes, kind in zip(figure.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
        _draw_panel(axes, row, kind, models)


def _draw_panel(axes: Axes, row: PanelRow, kind: str, models: Sequence[str]) -> None:
    times = [point.ms for point in row.points]
    axes.set_xlim(_limits(times, _MIN_MS_SPAN * max(times)))
    axes.set_ylim(_limits([point.ap[kind] for point in row.points if kind in point.ap], _MIN_AP_SPAN))
    axes.set_ylabel(f'{AP_KINDS[kind]} AP', fontsize=_FONT_SIZE)
    axes.tick_params(labelsize=_FONT_SIZE)
    axes.grid(color='0.9', linewidth=0.6)
    axes.set_axisbelow(True)
    served: dict[str, list[tuple[float, float]]] = {}
    for name in dict.fromkeys(point.name for point in row.points):
        points = [point for point in row.points if point.name == name]
        colour, marker = _style(name, models, row.published)
        if not any(point.ap for point in points):
            for point in points:
                axes.axvline(point.ms, color=colour, linestyle='--', linewidth=1.2)
            continue
        forms = dict.fromkeys((point.variant, point.form) for point in points if kind in point.ap)
        places = []
        for variant, form in sorted(forms, key=lambda how: (how[0] != 'unfused', how[1])):
            runs = [(p.ms, p.ap[kind]) for p in points if (p.variant, p.form) == (variant, form) and kind in p.ap]
            look = {'mec': 'black' if form else colour, 'mfc': 'white' if variant == 'unfused' else colour}
            # Seeds of one model are one place: their mean, with each seed as a small marker.
            places.append(tuple(sum(values) / len(runs) for values in zip(*runs, strict=True)))
            axes.plot(*places[-1], marker, ms=7, mew=1.4, zorder=3, **look)
            if len(runs) > 1:
                axes.plot(*zip(*runs, strict=True), marker, ms=3, mew=0.8, zorder=3, **look)
        for start, end in zip(places, places[1:], strict=False):
            arrow = {'arrowstyle': '->', 'color': colour, 'shrinkA': 5, 'shrinkB': 5}
            axes.annotate('', end, start, arrowprops=arrow)
        if places:
            served.setdefault(points[0].series, []).append(places[-1])
    for line in served.values():
        axes.plot(*zip(*sorted(line), strict=True), color=_GREY, linestyle=':', linewidth=1)


def _style(name: str, models: Sequence[str], published: bool) -> tuple[str, str]:
    """Colour and marker of a model, by its place among all that one figure shows."""
    index = models.index(name)
    return _GREY if published else _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]


def _legend(rows: Sequence[PanelRow], models: Sequence[str]) -> list[Line2D]:
    """One entry per model, then one per form."""
    measured = [point for row in rows if not row.published for point in row.points]
    with_ap = {point.name for row in rows for point in row.points if point.ap}
    handles = []
    for name in models:
        colour, marker = _style(name, models, all(point.name != name for point in measured))
        if name in with_ap:
            handles.append(Line2D([], [], color=colour, marker=marker, linestyle='', label=name))
        else:
            handles.append(Line2D([], [], color=colour, linestyle='--', label=f'{name}: AP not measured'))
    for variant, form in dict.fromkeys((point.variant, point.form) for point in measured if point.ap):
        look = {'mec': 'black' if form else '0.55', 'mfc': 'white' if variant == 'unfused' else '0.55'}
        label = ', '.join(filter(None, [variant, form]))
        handles.append(Line2D([], [], marker='o', linestyle='', mew=1.4, label=label, **look))
    return handles


def _limits(values: Sequence[float], min_span: float) -> tuple[float, float]:
    """The range of the values, none of them negative, with room around them."""
    low, high = min(values), max(values)
    room = max(0.15 * (high - low), (min_span - (high - low)) / 2)
    return max(low - room, -0.1 * min_span), high + room
