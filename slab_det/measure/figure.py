"""The style of every picture, and two of them: AP over latency (SLAB, Guo et al., ICML 2024, Figure 5), and over a run.

Nothing is compared that was not measured alike: entries that share detector, data, training and latency scope stand in
one row of panels.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from cycler import cycler
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

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
from slab_det.runtime.run_folder import whole_file

WIDTH = 7.2  # inches: the text width of A4
INK = '#000000'
# Okabe and Ito's colours that differ in grey as well, the darkest first; where they are used up, dashed.
COLOURS = (INK, '#0072B2', '#D55E00', '#56B4E9')
LOOKS = cycler(linestyle=('-', '--', ':')) * cycler(color=COLOURS)
MARKS = cycler(marker=('o', 's', 'D', '^', 'v')) * cycler(color=COLOURS)
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
_FACES = {'unfused': 'white', 'fused': INK}


@styled
def save_figure(figure: Figure, path: str | Path) -> None:
    """Writes a picture in the format of its suffix; the folder need not exist."""
    suffix = Path(path).suffix
    with whole_file(path) as name:
        figure.savefig(name, format=suffix[1:] or 'png', metadata={'Date': None} if suffix == '.svg' else None)


@styled
def ap_latency_figure(entries: Sequence[ReportEntry]) -> Figure:
    """Draws box and mask AP, or the accuracy of classifiers (times 100), over median latency.

    Hollow markers are unfused, filled ones fused, and an arrow leads from one to the other. A model whose AP was not
    measured stands as a dashed line at its latency.

    Args:
        entries: Rows; those without latency are left out.

    Raises:
        ReportError: If no entry has both AP and latency.
    """
    timed = [entry for entry in entries if entry.latency]
    rows = list(dict.fromkeys((e.detector, latency_scope(e), ap_scope(e)) for e in timed if e.ap))
    if not rows:
        raise ReportError('no entry has both AP and latency: run slab-det test --latency first')
    figure = Figure(figsize=(WIDTH, 3.4 * len(rows)))
    parts = figure.subfigures(len(rows), 1, squeeze=False)[:, 0]
    for part, (detector, latency, scope) in zip(parts, rows, strict=True):
        measured = [e for e in timed if (e.detector, latency_scope(e)) == (detector, latency)]
        shown = [e for e in measured if not e.ap or ap_scope(e) == scope]
        kinds = measured_kinds(shown)
        data, *training = scope.split('; ')
        lines = (f'{detector}, {score(kinds)} on {data}', *training, f'ms: median latency, {latency}')
        part.suptitle('\n'.join(textwrap.fill(line, 110) for line in lines))
        looks = dict(zip(dict.fromkeys(entry.name for entry in shown), MARKS(), strict=False))
        for axes, kind in zip(part.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
            _draw_panel(axes, shown, kind, looks)
        keys = {name: {'linestyle': '', **look} for name, look in looks.items()}
        keys |= {v: {'linestyle': '', 'marker': 'o', 'mec': INK, 'mfc': face} for v, face in _FACES.items()}
        if not all(entry.ap for entry in shown):
            keys[f'{score(kinds)} not measured'] = {'linestyle': '--', 'color': INK}
        handles = [Line2D([], [], label=textwrap.fill(label, 45), **look) for label, look in keys.items()]
        part.legend(handles=handles, loc='outside lower center', ncols=2)
    return figure


def _draw_panel(axes: Axes, entries: Sequence[ReportEntry], kind: str, looks: Mapping[str, Mapping]) -> None:
    """Draws box AP, mask AP or another kind over latency; ``looks`` has the marker and colour of each name."""
    times, column = [entry.latency['median_ms'] for entry in entries], main_column(kind)
    axes.set(xlabel='ms', ylabel=AP_KINDS[kind], xlim=limits(times, _MIN_MS_SPAN * max(times)))
    axes.set_ylim(limits([100 * e.ap[kind][column] for e in entries if kind in (e.ap or {})], _MIN_AP_SPAN, 100))
    for name, look in looks.items():
        # Unfused before fused: the arrow's direction.
        named = sorted((entry for entry in entries if entry.name == name), key=lambda e: e.variant, reverse=True)
        drawn = [entry for entry in named if kind in (entry.ap or {})]
        places = [(entry.latency['median_ms'], 100 * entry.ap[kind][column]) for entry in drawn]
        for entry, place in zip(drawn, places, strict=True):
            face = look['color'] if entry.variant == 'fused' else 'white'
            axes.plot(*place, linestyle='', zorder=3, mfc=face, **look)
        if [entry.variant for entry in drawn] == ['unfused', 'fused']:
            arrow = {'arrowstyle': '->', 'color': INK, 'shrinkA': 5, 'shrinkB': 5}
            axes.annotate('', places[1], places[0], arrowprops=arrow)
        for entry in named:
            if not entry.ap:
                axes.axvline(entry.latency['median_ms'], color=look['color'], linestyle='--')


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
    figure = Figure(figsize=(WIDTH, 3.2))
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
    for (name, scalars), look in zip(runs.items(), LOOKS(), strict=False):
        lower.plot(*_points(scalars.get('gamma', {})), **look)
        upper.plot(*_points(scalars.get(metric, {}), factor), marker='o', mfc='white', label=name, **look)
        if final := scalars.get(f'recalibrated/{metric}'):
            upper.plot(*_points(final, factor), 'o', color=look['color'], label=f'{name}, recalibrated')
    upper.set(ylabel=AP_KINDS[kind], ylim=(0, min(1.05 * upper.get_ylim()[1], 100)))
    lower.set(ylabel='gamma', ylim=(-0.05, 1.05), xlabel='iteration')
    figure.legend(loc='outside right upper')
    return figure


def _points(values: Mapping[int, float], factor: float = 1) -> tuple[list[int], list[float]]:
    return [*values], [factor * value for value in values.values()]
