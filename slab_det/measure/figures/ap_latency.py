"""AP over latency (SLAB, Guo et al., ICML 2024, Figure 5): one line per norm and attention, through the model sizes.

Nothing is compared that was not measured alike. What shares detector, data, training and latency scope stands in
one group of panels; the paper's points stand in grey panels of their own, over their own latency axis.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, SubFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from slab_det.measure.figures.labels import FONT_SIZE, Label, Panel, place_labels, wrap
from slab_det.measure.figures.series import ModelName, Style, parse_name, style_of
from slab_det.measure.paper import PaperTable, tables_with_latency
from slab_det.measure.reporting import AP_KINDS, ReportEntry, ap_scope, latency_scope
from slab_det.runtime.errors import ReportError

_GREY = '#707070'
_WIDTH = 7.2  # inches: the text width of A4
_LINE = 108  # characters of FONT_SIZE in it
# Narrower axes would blow the difference of two runs up to the height of the panel.
_MIN_AP_SPAN = 4.0
_MIN_MS_SPAN = 0.2  # of the largest latency
# How a model is run may be compared, and is told by the marker; see slab_det.measure.latency_table.check_comparable.
_FORMS = {'deployed': 'deployed', 'compiled': 'torch.compile', 'channels_last': 'channels_last', 'autocast': 'autocast'}


class Point(NamedTuple):
    """One measured or published detector.

    Attributes:
        name: Its row label.
        ms: Latency in milliseconds.
        ap: AP times 100; None where it was not measured.
        variant: 'unfused' or 'fused'; empty in papers.
        form: How it was run, where that was not plainly: 'deployed', 'torch.compile', …
    """

    name: ModelName
    ms: float
    ap: float | None
    variant: str = ''
    form: str = ''


@dataclass(frozen=True)
class Column:
    """Panels over one latency axis, one per kind of AP.

    Attributes:
        detector: Type of the detectors.
        title: What the APs were measured on; the source, if published.
        latency: What the latencies are.
        points: By kind, 'bbox' and 'segm'.
        unmeasured: Models without AP.
        published: What the legend calls the numbers of a paper; empty for ours.
        comparable: Whether the APs were measured on COCO val2017.
    """

    detector: str
    title: str
    latency: str
    points: dict[str, list[Point]]
    unmeasured: tuple[Point, ...] = ()
    published: str = ''
    comparable: bool = False

    @property
    def all_points(self) -> list[Point]:
        """The points of every panel, and those without AP."""
        return [point for points in (*self.points.values(), self.unmeasured) for point in points]


def draw_ap_latency(entries: Sequence[ReportEntry], path: str | Path, paper: bool = False) -> None:
    """Draws box and mask AP (times 100) over median latency to a PNG.

    Hollow markers are unfused, filled ones fused, those with a black edge are also deployed or compiled, and arrows
    lead to the last of them; a line joins the sizes of one architecture, through the last. A model whose AP was not
    measured stands as a vertical line at its latency.

    Args:
        entries: Rows; those without latency are left out.
        path: The PNG to write.
        paper: Draw the published points of the same detector beside ours, in grey, over the paper's latency.
            The AP axis is shared where ours is COCO val2017 too.

    Raises:
        ReportError: If no entry has both AP and latency.
    """
    figure = ap_latency_figure(entries, paper)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def ap_latency_figure(entries: Sequence[ReportEntry], paper: bool = False) -> Figure:
    """The picture of :func:`draw_ap_latency`, not yet written."""
    rows = [[ours, *(_published(ours) if paper else [])] for ours in _measured_columns(entries)]
    if not rows:
        raise ReportError('no entry has both AP and latency: run tools/test.py with --latency first')
    # Ours first: they get the styles that differ most.
    columns = [row[0] for row in rows] + [column for row in rows for column in row[1:]]
    series = list(dict.fromkeys(point.name.series for column in columns for point in column.all_points))
    heights = [len(row[0].points) * 2.5 + 0.9 if len(row) > 1 else 3.6 for row in rows]
    legend = _legend(columns, series)
    # The line of an entry, and the space beside it, take about as much as 12 characters.
    num_columns = max(1, min(3, _LINE // (12 + max(len(handle.get_label()) for handle in legend))))
    height = sum(heights) + 0.25 * -(-len(legend) // num_columns)
    figure = Figure(figsize=(_WIDTH, height), dpi=200, layout='constrained')
    FigureCanvasAgg(figure)
    figure.legend(
        handles=legend, loc='outside lower center', ncols=num_columns, fontsize=FONT_SIZE, frameon=False, handlelength=4
    )
    subfigures = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    panels = [_draw_row(subfigure, row, series) for subfigure, row in zip(subfigures, rows, strict=True)]
    figure.draw_without_rendering()
    for panel in (panel for row_panels in panels for panel in row_panels):
        place_labels(panel)
    return figure


def _measured_columns(entries: Iterable[ReportEntry]) -> list[Column]:
    """One column for each set of entries that may be compared and of which one has AP."""
    timed = [entry for entry in entries if entry.latency]
    groups: dict[tuple[str, str, str], list[ReportEntry]] = {}
    for entry in timed:
        if entry.ap:
            groups.setdefault((*_conditions(entry), _ap_scope_of_any_seed(entry)), []).append(entry)
    columns = []
    for (detector, latency, scope), members in groups.items():
        points = {kind: [_point(entry, kind) for entry in members if kind in entry.ap] for kind in AP_KINDS}
        without_ap = [entry for entry in timed if not entry.ap and _conditions(entry) == (detector, latency)]
        columns.append(
            Column(
                detector=detector,
                title=f'{detector}, AP on {scope}{_seeds(members)}',
                latency=f'median latency (ms): {latency}',
                points={kind: found for kind, found in points.items() if found},
                unmeasured=tuple(_point(entry) for entry in without_ap),
                comparable=all(_is_coco(entry) for entry in members),
            )
        )
    return columns


def _conditions(entry: ReportEntry) -> tuple[str, str]:
    """Detector and latency scope, whatever the form."""
    return entry.detector, latency_scope(replace(entry, latency={**entry.latency, **dict.fromkeys(_FORMS, False)}))


def _point(entry: ReportEntry, kind: str | None = None) -> Point:
    form = ', '.join(text for flag, text in _FORMS.items() if entry.latency.get(flag))
    ap = None if kind is None else 100 * entry.ap[kind]['AP']
    return Point(parse_name(entry.name), entry.latency['median_ms'], ap, entry.variant, form)


def _published(ours: Column) -> list[Column]:
    """The published points of the same detector, for the same kinds of AP."""
    return [_paper_column(table, list(ours.points)) for table in tables_with_latency(ours.detector)]


def _paper_column(table: PaperTable, kinds: Sequence[str]) -> Column:
    points = {
        kind: [
            Point(parse_name(name), row.ms, (row.box if kind == 'bbox' else row.mask)[0])
            for name, row in table.rows.items()
        ]
        for kind in kinds
    }
    return Column(
        detector=table.detector,
        title=f'published, not measured here: {table.source}, {table.detector}, {table.epochs} epochs, COCO val2017',
        latency=f'latency (ms): {table.latency}',
        points=points,
        published=f'paper, {table.latency.partition(",")[0]}',
        comparable=True,
    )


def _draw_row(figure: SubFigure, row: Sequence[Column], series: Sequence[str]) -> list[Panel]:
    """Draws columns side by side, box above mask AP; a single column lies on its side."""
    kinds = list(row[0].points)
    if len(row) == 1:
        grid = figure.subplots(1, len(kinds), squeeze=False).T
        figure.suptitle(wrap(row[0].title, _LINE), fontsize=FONT_SIZE)
        figure.supxlabel(wrap(row[0].latency, _LINE), fontsize=FONT_SIZE)
    else:
        grid = figure.subplots(len(kinds), len(row), sharex='col', squeeze=False)
        for column, top, bottom in zip(row, grid[0], grid[-1], strict=True):
            colour = _GREY if column.published else 'black'
            top.set_title(wrap(column.title, _LINE // len(row)), fontsize=FONT_SIZE, color=colour)
            bottom.set_xlabel(wrap(column.latency, _LINE // len(row)), fontsize=FONT_SIZE, color=colour)
    panels = []
    for kind, axes_of_kind in zip(kinds, grid, strict=True):
        for column, axes in zip(row, axes_of_kind, strict=True):
            shared = [other for other in row if other.comparable] if column.comparable else [column]
            axes.set_ylim(_limits([point.ap for other in shared for point in other.points[kind]], _MIN_AP_SPAN))
            panels.append(_draw_panel(axes, column, kind, series))
    return panels


def _draw_panel(axes: Axes, column: Column, kind: str, series: Sequence[str]) -> Panel:
    points = column.points[kind]
    times = [point.ms for point in (*points, *column.unmeasured)]
    axes.set_xlim(_limits(times, _MIN_MS_SPAN * max(times)))
    axes.set_ylabel(f'{AP_KINDS[kind]} AP', fontsize=FONT_SIZE + 1)
    axes.tick_params(labelsize=FONT_SIZE)
    axes.locator_params(nbins=6)
    axes.grid(color='0.9', linewidth=0.6)
    axes.set_axisbelow(True)
    panel = Panel(axes, [], [(point.ms, point.ap) for point in points], [])
    for name in dict.fromkeys(point.name.series for point in points):
        style = style_of(name, series)
        style = style._replace(colour=_GREY) if column.published else style
        _draw_series(panel, [point for point in points if point.name.series == name], style)
    floor, ceiling = axes.get_ylim()
    for name, ms, _, *how in column.unmeasured:
        axes.axvline(ms, color=style_of(name.series, series).colour, linestyle=':', linewidth=1.2)
        panel.labels.append(Label(f'{" ".join([name.label, *how]).strip()},\nAP not measured', (ms, floor)))
        panel.lines.append(((ms, floor), (ms, ceiling)))
    return panel


def _draw_series(panel: Panel, points: Sequence[Point], style: Style) -> None:
    """A marker per model and form, the arrows from one form to the last, and the line through the sizes."""
    line = []
    for name in dict.fromkeys(point.name for point in points):
        places = {}
        # Hollow before filled, plain before deployed.
        forms = {point[3:] for point in points if point.name == name}
        for how in sorted(forms, key=lambda how: (how[0] != 'unfused', how)):
            runs = [(point.ms, point.ap) for point in points if (point.name, *point[3:]) == (name, *how)]
            # Seeds of one model are one point of its line: their mean.
            places[how] = tuple(sum(values) / len(runs) for values in zip(*runs, strict=True))
            look = _marker(style.colour, *how)
            panel.axes.plot(*places[how], style.marker, ms=7, mew=1.4, zorder=3, **look)
            if len(runs) > 1:
                panel.axes.plot(*zip(*runs, strict=True), style.marker, ms=3, mew=0.8, zorder=3, **look)
        *before, served = places.values()
        for start in before:
            arrow = {'arrowstyle': '->', 'color': style.colour, 'shrinkA': 5, 'shrinkB': 5}
            panel.axes.annotate('', served, start, arrowprops=arrow)
            panel.lines.append((start, served))
        line.append(served)
        panel.points.extend(places.values())
        panel.labels.append(Label(name.size, served))
    line.sort()
    panel.lines.extend(pairwise(line))
    panel.axes.plot(*zip(*line, strict=True), color=style.colour, linestyle=style.dashes, linewidth=1.2)


def _marker(colour: str, variant: str, form: str) -> dict[str, str]:
    return {'mec': 'black' if form else colour, 'mfc': 'white' if variant == 'unfused' else colour}


def _legend(columns: Sequence[Column], series: Sequence[str]) -> list[Line2D]:
    """One entry per series, then what filled, hollow and grey mean."""
    titles, measured = {}, set()
    for column in columns:
        found = {point.name.series: point.name.title for point in column.all_points}
        titles |= found
        measured |= set() if column.published else set(found)
    handles = []
    for name in series:
        style = style_of(name, series)
        colour = style.colour if name in measured else _GREY
        handles.append(Line2D([], [], color=colour, marker=style.marker, linestyle=style.dashes, label=titles[name]))
    points = [point for column in columns for point in column.all_points]
    for variant, form in dict.fromkeys(point[3:] for point in points if point.variant):
        look = _marker('0.55', variant, form)
        label = ', '.join(filter(None, [variant, form]))
        handles.append(Line2D([], [], marker='o', linestyle='', mew=1.4, label=label, **look))
    if any(_repeated(column) for column in columns):
        handles.append(Line2D([], [], marker='o', ms=3, linestyle='', color='0.4', label='one run; large: mean'))
    handles += [
        Patch(color=_GREY, label=f'grey: {published}')
        for published in dict.fromkeys(column.published for column in columns)
        if published
    ]
    return handles


def _repeated(column: Column) -> bool:
    """Whether a model was measured more than once."""
    return any(len(points) > len({(point.name, *point[3:]) for point in points}) for points in column.points.values())


def _limits(values: Sequence[float], min_span: float) -> tuple[float, float]:
    """The range of the values, none of them negative, with room for labels around them."""
    low, high = min(values), max(values)
    room = max(0.2 * (high - low), (min_span - (high - low)) / 2)
    return max(low - room, -0.1 * min_span), high + room


def _ap_scope_of_any_seed(entry: ReportEntry) -> str:
    """Data and training; seeds may be compared, and are named all together."""
    training = {key: value for key, value in (entry.training or {}).items() if key != 'seed' and value is not None}
    return ap_scope(replace(entry, training=training))


def _seeds(entries: Iterable[ReportEntry]) -> str:
    seeds = sorted({str(entry.training['seed']) for entry in entries if 'seed' in (entry.training or {})})
    return f', seed{"s" if len(seeds) > 1 else ""} {", ".join(seeds)}' if seeds else ''


def _is_coco(entry: ReportEntry) -> bool:
    """Whether AP is that of the whole val2017: subsets of it carry its file name too."""
    dataset = entry.dataset or {}
    return Path(dataset.get('ann_file') or '').name == 'instances_val2017.json' and dataset.get('images') == 5000
