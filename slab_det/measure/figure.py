"""The style of every picture, and two of them: AP over latency (SLAB, Guo et al., ICML 2024, Figure 5), and over a run.

Nothing is compared that was not measured alike: entries that share detector, data, training and latency scope stand in
one row of panels.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

from slab_det.measure.report import (
    AP_KINDS,
    ReportEntry,
    ap_scope,
    latency_scope,
    main_column,
    measured_kinds,
    score,
)
from slab_det.runtime.errors import ReportError
from slab_det.runtime.run_folder import whole_files

WIDTH = 7.2  # inches: the text width of A4
INK = '#000000'
# Okabe and Ito's colours that differ in grey as well, the darkest first; where they are used up, dashed.
COLOURS = (INK, '#0072B2', '#D55E00', '#56B4E9')
LOOKS = cycler(linestyle=('-', '--', ':')) * cycler(color=COLOURS)
# A decorator of every function that draws or writes a picture.
styled = rc_context(
    {
        'axes.axisbelow': True,
        'axes.grid': True,
        'axes.spines.right': False,
        'axes.spines.top': False,
        'axes.titlesize': 8,
        'figure.constrained_layout.use': True,
        'figure.dpi': 200,  # of a PNG, and of maps in an SVG
        'figure.titlesize': 8,
        'font.size': 8,  # points; smaller is not read in print
        'grid.color': '0.9',
        'grid.linewidth': 0.6,
        'legend.frameon': False,
        'lines.linewidth': 1.2,
        'lines.markeredgewidth': 1.4,
        'lines.markersize': 6,
        'savefig.facecolor': 'white',
        'svg.fonttype': 'none',  # text, not outlines: a fifth of the size
        'svg.hashsalt': 'slab_det',  # the same picture has the same bytes
    }
)
# Narrower axes would blow the difference of two runs up to the size of the panel.
_MIN_AP_SPAN = 4.0
_MIN_MS_SPAN = 0.2  # share of the largest latency
_BESIDE = 7  # points from a marker to its name
_FACES = {'unfused': 'white', 'fused': INK}


@styled
def save_figure(figure: Figure, path: str | Path) -> None:
    """Writes a picture in the format of its suffix; the folder need not exist."""
    suffix = Path(path).suffix
    with whole_files(path) as (name,):
        figure.savefig(name, format=suffix[1:] or 'png', metadata={'Date': None} if suffix == '.svg' else None)


@styled
def ap_latency_figure(entries: Sequence[ReportEntry]) -> Figure:
    """Draws box and mask AP, or the accuracy of classifiers (times 100), over median latency.

    Hollow markers are unfused, filled ones fused, and an arrow leads from one to the other. A model whose AP was not
    measured stands as a vertical line at its latency.

    Args:
        entries: Rows; those without latency are left out.

    Raises:
        ReportError: If no entry has both AP and latency.
    """
    timed = [entry for entry in entries if entry.latency]
    rows = list(dict.fromkeys((e.detector, latency_scope(e), ap_scope(e)) for e in timed if e.ap))
    if not rows:
        raise ReportError('no entry has both AP and latency: run slab-det test --latency first')
    figure = Figure(figsize=(WIDTH, 3.2 * len(rows)))
    panels = []
    parts = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
    for part, (detector, latency, scope) in zip(parts, rows, strict=True):
        measured = [e for e in timed if (e.detector, latency_scope(e)) == (detector, latency)]
        shown = [e for e in measured if not e.ap or ap_scope(e) == scope]
        kinds = measured_kinds(shown)
        data, *training = scope.split('; ')
        lines = (f'{detector}, {score(kinds)} on {data}', *training)
        part.suptitle('\n'.join(textwrap.fill(line, 110) for line in lines))
        part.supxlabel(textwrap.fill(f'median latency (ms): {latency}', 110), fontsize=8)
        for axes, kind in zip(part.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
            panels.append((axes, _draw_panel(axes, shown, kind)))
    variants = [variant for variant in _FACES if any(entry.ap and entry.variant == variant for entry in timed)]
    handles = [Line2D([], [], marker='o', linestyle='', mec=INK, mfc=_FACES[v], label=v) for v in variants]
    panels[0][0].legend(handles=handles, loc='lower left', bbox_to_anchor=(0, 1), ncols=2, borderaxespad=0)
    # Names are placed where the layout leaves room for them.
    figure.draw_without_rendering()
    for axes, points in panels:
        _place_names(axes, points)
    return figure


def _draw_panel(axes: Axes, entries: Sequence[ReportEntry], kind: str) -> list[tuple[str, float, float]]:
    """Draws all but the names, and returns them: which name, and the point that it belongs to."""
    times = [entry.latency['median_ms'] for entry in entries]
    axes.set_xlim(limits(times, _MIN_MS_SPAN * max(times)))
    column = main_column(kind)
    axes.set_ylim(limits([100 * e.ap[kind][column] for e in entries if kind in (e.ap or {})], _MIN_AP_SPAN, 100))
    axes.set_ylabel(AP_KINDS[kind])
    named = []
    for name in dict.fromkeys(entry.name for entry in entries):
        places, variants = [], []
        # Unfused before fused: the arrow's direction.
        for entry in sorted((e for e in entries if e.name == name), key=lambda e: e.variant, reverse=True):
            ms = entry.latency['median_ms']
            if not entry.ap:
                axes.axvline(ms, color=INK, linestyle='--')
                label = axes.text(ms, 0.03, f'{name}: {score([kind])} not measured', rotation=90, ha='right')
                label.set_transform(axes.get_xaxis_transform())
            elif kind in entry.ap:
                places.append((ms, 100 * entry.ap[kind][column]))
                variants.append(entry.variant)
                axes.plot(*places[-1], 'o', zorder=3, mec=INK, mfc=_FACES[entry.variant])
        if variants == ['unfused', 'fused']:
            arrow = {'arrowstyle': '->', 'color': INK, 'shrinkA': 5, 'shrinkB': 5}
            axes.annotate('', places[1], places[0], arrowprops=arrow)
        if places:
            named.append((name, *places[-1]))
    return named


def _place_names(axes: Axes, points: Sequence[tuple[str, float, float]]) -> None:
    """Writes the name of each point beside it, where it covers least of markers, other names and the axes' edges."""
    inside, point = axes.get_window_extent(), axes.figure.dpi / 72
    lines = [line.get_transform().transform(line.get_xydata()) for line in axes.lines]
    arrows = [axes.transData.transform([text.xyann, text.xy]) for text in axes.texts if not text.get_text()]
    taken = [text.get_window_extent() for text in axes.texts if text.get_text()]
    for line in (*lines, *arrows):
        taken += [Bbox([place - 6 * point, place + 6 * point]) for place in line]
        between = (place for ends in pairwise(line) for place in np.linspace(*ends, 40))
        taken += [Bbox([place - point, place + point]) for place in between]
    for name, x, y in points:
        label = axes.annotate(textwrap.fill(name, 26), (x, y), (0, 0), textcoords='offset points', in_layout=False)
        found = []
        # Farther away only where there is no room nearby.
        for distance in (_BESIDE, 2 * _BESIDE, 4 * _BESIDE, 6 * _BESIDE):
            for dx, dy in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)):
                box = _move(label, distance * dx, distance * dy)
                covered = sum(_overlap(box, other) for other in taken) + _overlap(box, box) - _overlap(box, inside)
                found.append((covered, len(found), distance * dx, distance * dy))
        _, place, *offset = min(found)
        taken.append(_move(label, *offset))
        if place >= 8:
            line = {'arrowstyle': '-', 'color': '0.6', 'linewidth': 0.6, 'shrinkB': 4}
            axes.annotate('', (x, y), offset, textcoords='offset points', in_layout=False, arrowprops=line)


def _move(label: Annotation, dx: float, dy: float) -> Bbox:
    """Puts the near edge of a label at this offset from its point, and returns its box."""
    label.set(
        position=(dx, dy),
        horizontalalignment=('center', 'left', 'right')[int(np.sign(dx))],
        verticalalignment=('center', 'bottom', 'top')[int(np.sign(dy))],
    )
    return label.get_window_extent()


def _overlap(one: Bbox, other: Bbox) -> float:
    shared = Bbox.intersection(one, other)
    return shared.width * shared.height if shared else 0.0


def limits(values: Sequence[float], min_span: float, most: float = np.inf) -> tuple[float, float]:
    """The range of the values with room around them, between 0 and ``most``, which the values keep to."""
    low, high = min(values), max(values)
    room = max(0.15 * (high - low), (min_span - (high - low)) / 2)
    return max(low - room, 0), min(high + room, most)


def read_scalars(work_dir: str | Path) -> dict[str, dict[int, float]]:
    """What a run logged, over its iterations: ``{'gamma': {20: 0.95, …}, …}``.

    Of what two parts of a resumed run have, the later counts; of runs that began anew in the same folder, the last.
    """
    scalars: dict[str, dict[int, float]] = {}
    iteration = 0
    for file in sorted(Path(work_dir).glob('*/vis_data/scalars.json')):
        lines = [*map(json.loads, file.read_text().splitlines())]
        first = next((line['iter'] for line in lines if 'iter' in line), math.inf)
        before = {name: {at: y for at, y in values.items() if at < first} for name, values in scalars.items()}
        scalars = {name: values for name, values in before.items() if values}
        for line in lines:
            # A validation says its epoch, which is 0 in runs that count iterations: it stands behind its iteration.
            iteration = line.get('iter', iteration)
            for name, value in line.items():
                scalars.setdefault(name, {})[iteration] = value
    return scalars


@styled
def training_figure(runs: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Figure:
    """Draws AP (times 100) or top-1 accuracy, and gamma, over the iterations of runs.

    AP is that of the validations, of masks where the detector has them; a filled marker is the AP after recalibration.

    Args:
        runs: What :func:`read_scalars` found of each run, by its name.
    """
    figure = Figure(figsize=(0.6 * WIDTH, 3.2))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    # mmdet logs AP up to 1, mmpretrain and mmsegmentation per cent.
    metrics = {
        'segm': ('coco/segm_mAP', 100),
        'accuracy': ('accuracy/top1', 1),
        'iou': ('mIoU', 1),
        'bbox': ('coco/bbox_mAP', 100),
    }
    logged = {*chain(*runs.values())}
    kind = next((kind for kind, (metric, _) in metrics.items() if metric in logged), 'bbox')
    metric, factor = metrics[kind]
    named = []
    for (name, scalars), look in zip(runs.items(), LOOKS(), strict=False):
        lower.plot(*_points(scalars.get('gamma', {})), **look)
        curve = _points(scalars.get(metric, {}), factor)
        upper.plot(*curve, marker='o', mfc='white', label=name, **look)
        # The middle of a curve is farther from the others than its end.
        named += [(name, *place) for place in [*zip(*curve, strict=True)][len(curve[0]) // 2 :][:1]]
        if final := scalars.get(f'recalibrated/{metric}'):
            label, place = f'{name}, recalibrated', _points(final, factor)
            upper.plot(*place, 'o', color=look['color'], label=label)
            named.append((label, place[0][-1], place[1][-1]))
    upper.set(ylabel=AP_KINDS[kind], ylim=(0, min(1.05 * upper.get_ylim()[1], 100)))
    lower.set(ylabel='gamma', ylim=(-0.05, 1.05), xlabel='iteration')
    figure.draw_without_rendering()
    _place_names(upper, named)
    return figure


def _points(values: Mapping[int, float], factor: float = 1) -> tuple[list[int], list[float]]:
    return [*values], [factor * value for value in values.values()]
