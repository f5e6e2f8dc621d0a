"""AP over latency as a picture (SLAB, Figure 5): one colour and marker per norm."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from slab_det.errors import ReportError
from slab_det.reporting import ReportEntry, latency_scope

# Okabe and Ito's colours: told apart by colour-blind readers; the markers do it in grey print.
_COLOURS = ('#0072B2', '#D55E00', '#009E73', '#CC79A7', '#56B4E9', '#E69F00', '#000000')
_MARKERS = ('o', 's', '^', 'D', 'v', 'P', 'X')
# Where a label may stand, in points from its marker, best first.
_OFFSETS = sorted(
    product((8, 0, -8, 24, -24), (10, -14, 24, -28, 40, -44)),
    key=lambda offset: abs(offset[0] - 8) + abs(offset[1]),
)


def draw_ap_latency(entries: Sequence[ReportEntry], path: str | Path, kind: str = 'bbox') -> None:
    """Draws AP (times 100) over median latency to a PNG, one panel per latency scope.

    Hollow markers are unfused, filled ones fused, and an arrow leads from one to the other. A model whose AP
    was not measured stands as a vertical line at its latency.

    Args:
        entries: Rows; those without latency are left out.
        path: The PNG to write.
        kind: 'bbox' or 'segm'.

    Raises:
        ReportError: If no entry has both AP and latency.
    """
    timed = [entry for entry in entries if entry.latency]
    if not any(_ap(entry, kind) is not None for entry in timed):
        raise ReportError('no entry has both AP and latency: run tools/test.py with --latency first')
    scopes = list(dict.fromkeys(latency_scope(entry) for entry in timed))
    norms = list(dict.fromkeys(entry.norm for entry in timed))
    figure = Figure(figsize=(7.0, 1.0 + 3.8 * len(scopes)), dpi=200, layout='constrained')
    FigureCanvasAgg(figure)
    for axes, scope in zip(figure.subplots(len(scopes), squeeze=False)[:, 0], scopes, strict=True):
        _draw_panel(axes, [entry for entry in timed if latency_scope(entry) == scope], norms, kind)
        axes.set_title(scope, fontsize=8)
        axes.set_xlabel('median latency (ms)')
        axes.set_ylabel('box AP' if kind == 'bbox' else 'mask AP')
    figure.legend(handles=_legend(norms), loc='outside lower center', ncols=len(norms) + 2, fontsize=8, frameon=False)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_panel(axes: Axes, entries: Sequence[ReportEntry], norms: Sequence[str], kind: str) -> None:
    points = [(entry, entry.latency['median_ms'], _ap(entry, kind)) for entry in entries]
    measured = [(entry, ms, 100 * ap) for entry, ms, ap in points if ap is not None]
    labels: list[tuple[str, tuple[float, float], str]] = []
    for entry, ms, ap in measured:
        colour, marker = _style(entry, norms)
        face = colour if entry.variant == 'fused' else 'white'
        axes.plot(ms, ap, marker, ms=8, mec=colour, mfc=face, mew=1.6, zorder=3)
        labels.append((entry.name, (ms, ap), colour))
    for (first, x, y), (second, to_x, to_y) in product(measured, measured):
        if (first.name, first.variant, second.variant) == (second.name, 'unfused', 'fused'):
            arrow = {'arrowstyle': '->', 'color': _style(first, norms)[0], 'shrinkA': 6, 'shrinkB': 6}
            axes.annotate('', (to_x, to_y), (x, y), arrowprops=arrow)
    _draw_family_lines(axes, measured, norms)
    unmeasured = [(entry, ms) for entry, ms, ap in points if ap is None]
    for entry, ms in unmeasured:
        axes.axvline(ms, color=_style(entry, norms)[0], linestyle=':', linewidth=1.2)
    axes.grid(alpha=0.3)
    axes.margins(0.25)
    floor = axes.get_ylim()[0]
    for entry, ms in unmeasured:
        labels.append((f'{entry.name} {entry.variant} (AP not measured)', (ms, floor), _style(entry, norms)[0]))
    # Both variants of a model share a name, which stands once, at the fused one drawn last.
    unique = {name: (name, point, colour) for name, point, colour in labels}
    _place_labels(axes, list(unique.values()), [(ms, ap) for _, ms, ap in measured])


def _draw_family_lines(axes: Axes, measured: Sequence[tuple[ReportEntry, float, float]], norms: Sequence[str]) -> None:
    """Joins the sizes of one architecture that share norm, attention and variant."""
    families = dict.fromkeys((entry.norm, entry.attention, entry.variant) for entry, _, _ in measured)
    for family in families:
        line = sorted((ms, ap) for e, ms, ap in measured if (e.norm, e.attention, e.variant) == family)
        style = '-' if family[2] == 'fused' else '--'
        colour = _COLOURS[norms.index(family[0]) % len(_COLOURS)]
        axes.plot(*zip(*line, strict=True), style, color=colour, linewidth=1, alpha=0.6)


def _place_labels(
    axes: Axes, labels: Sequence[tuple[str, tuple[float, float], str]], points: Sequence[tuple[float, float]]
) -> None:
    """Writes each label at the first offset where it covers no marker and no other label."""
    figure = axes.figure
    figure.canvas.draw()  # Lays the figure out: before, text has no extent and data no pixels.
    renderer = figure.canvas.get_renderer()
    radius = 7 * figure.dpi / 72
    taken = [Bbox([[x - radius, y - radius], [x + radius, y + radius]]) for x, y in axes.transData.transform(points)]
    frame = axes.get_window_extent(renderer)
    for text, point, colour in labels:
        label = axes.annotate(text, point, _OFFSETS[0], textcoords='offset points', fontsize=8, color=colour)
        label.set_path_effects([withStroke(linewidth=3, foreground='white')])  # Legible across a line.
        for offset in _OFFSETS:
            box = _move(label, offset, renderer)
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            if inside and not any(box.overlaps(other) for other in taken):
                break
        else:
            box = _move(label, _OFFSETS[0], renderer)
        taken.append(box)


def _move(label: Annotation, offset: tuple[float, float], renderer: object) -> Bbox:
    label.set_position(offset)
    label.set_horizontalalignment('left' if offset[0] > 0 else 'right' if offset[0] < 0 else 'center')
    return label.get_window_extent(renderer)


def _legend(norms: Sequence[str]) -> list[Line2D]:
    handles = [
        Line2D(
            [],
            [],
            color=_COLOURS[i % len(_COLOURS)],
            marker=_MARKERS[i % len(_MARKERS)],
            linestyle='',
            label=norm,
        )
        for i, norm in enumerate(norms)
    ]
    for variant, face in (('unfused', 'white'), ('fused', 'grey')):
        handles.append(Line2D([], [], marker='o', linestyle='', mec='grey', mfc=face, label=variant))
    return handles


def _style(entry: ReportEntry, norms: Sequence[str]) -> tuple[str, str]:
    index = norms.index(entry.norm)
    return _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]


def _ap(entry: ReportEntry, kind: str) -> float | None:
    return (entry.ap or {}).get(kind, {}).get('AP')
