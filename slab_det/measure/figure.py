"""Draws AP over latency (SLAB, Guo et al., ICML 2024, Figure 5) and AP over a training, and styles every picture."""

from __future__ import annotations

import json
import math
import re
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
# Okabe and Ito's colours that differ in grey as well, the darkest first.
COLOURS = (INK, '#0072B2', '#D55E00', '#56B4E9')
LOOKS = cycler(linestyle=('-', '--', ':')) * cycler(color=COLOURS)
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
        'figure.dpi': 200,  # of a PNG, and of maps in an SVG
        'figure.titlesize': 8,
        'font.size': 8,  # points; smaller text cannot be read in print
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
# Narrower axes would magnify the difference of two runs to the size of the panel.
_MIN_AP_SPAN = 4.0
_MIN_MS_SPAN = 0.2  # share of the largest latency
_FACES = {'unfused': 'white', 'fused': INK}


@styled
def save_figure(figure: Figure, path: str | Path) -> None:
    """Writes a picture in the format that its suffix names; the folder need not exist."""
    suffix = Path(path).suffix
    with whole_file(path) as name:
        figure.savefig(name, format=suffix[1:] or 'png', metadata={'Date': None} if suffix == '.svg' else None)


@styled
def ap_latency_figure(entries: Sequence[ReportEntry]) -> Figure:
    """Draws box and mask AP, or accuracy or mIoU (times 100), over median latency.

    Hollow markers are unfused, filled ones fused, and an arrow leads from one to the other. Entries that differ in
    detector, data, training or the conditions of the latency are not comparable: they get panels of their own.

    Args:
        entries: Rows of a report; those without AP or latency are left out.

    Raises:
        ReportError: If no entry has both AP and latency.
    """
    groups: dict[tuple[str, str, str], list[ReportEntry]] = {}
    for entry in entries:
        if entry.ap and entry.latency:
            groups.setdefault((entry.detector, latency_scope(entry), ap_scope(entry)), []).append(entry)
    if not groups:
        raise ReportError('no entry has both AP and latency: run slab-det test --latency first')
    figure = Figure(figsize=(WIDTH, 3.4 * len(groups)))
    parts = figure.subfigures(len(groups), 1, squeeze=False)[:, 0]
    for part, ((detector, latency, scope), shown) in zip(parts, groups.items(), strict=True):
        kinds = measured_kinds(shown)
        data, *training = scope.split('; ')
        # The key of a cache folder says nothing to a reader.
        data = re.sub(r'-[0-9a-f]{8,}(?=/)', '', data)
        lines = (f'{detector}, {score(kinds)} on {data}', *training, f'ms: median latency, {latency}')
        part.suptitle('\n'.join(textwrap.fill(line, 110) for line in lines))
        looks = dict(zip(dict.fromkeys(entry.name for entry in shown), MARKS(), strict=False))
        for axes, kind in zip(part.subplots(1, len(kinds), squeeze=False)[0], kinds, strict=True):
            _draw_panel(axes, [entry for entry in shown if kind in entry.ap], kind, looks)
        looks |= {form: {'marker': 'o', 'mec': INK, 'mfc': face} for form, face in _FACES.items()}
        handles = [Line2D([], [], ls='', label=textwrap.fill(label, 45), **look) for label, look in looks.items()]
        part.legend(handles=handles, loc='outside lower center', ncols=2)
    return figure


def _draw_panel(axes: Axes, entries: Sequence[ReportEntry], kind: str, looks: Mapping[str, Mapping]) -> None:
    """Draws one kind of AP over latency; ``looks`` has the marker and colour of each name."""
    places = [(entry.latency['median_ms'], 100 * entry.ap[kind][main_column(kind)]) for entry in entries]
    for name, look in looks.items():
        forms = {}
        for entry, place in zip(entries, places, strict=True):
            if entry.name == name:
                forms[entry.variant] = place
                face = look['color'] if entry.variant == 'fused' else _FACES['unfused']
                axes.plot(*place, linestyle='', zorder=3, mfc=face, **look)
        if len(forms) == 2:
            arrow = {'arrowstyle': '->', 'color': INK, 'shrinkA': 5, 'shrinkB': 5}
            axes.annotate('', forms['fused'], forms['unfused'], arrowprops=arrow)
    times, ap = zip(*places, strict=True)
    axes.set(xlabel='ms', ylabel=AP_KINDS[kind], xlim=limits(times, _MIN_MS_SPAN * max(times)))
    axes.set_ylim(limits(ap, _MIN_AP_SPAN, 100))


def limits(values: Sequence[float], min_span: float, most: float = np.inf) -> tuple[float, float]:
    """The range of an axis: the values with room around them, within 0 and ``most``."""
    low, high = min(values), max(values)
    room = max(0.15 * (high - low), (min_span - (high - low)) / 2)
    return max(low - room, 0), min(high + room, most)


def read_scalars(work_dir: str | Path) -> dict[str, dict[int, float]]:
    """Reads what a run logged, by iteration: ``{'gamma': {20: 0.95, …}, …}``.

    A resumed run replaces what was logged from its first iteration on. So does a run that began anew in this folder.
    """
    scalars: dict[str, dict[int, float]] = {}
    iteration = 0
    for file in sorted(Path(work_dir).glob('*/vis_data/scalars.json')):
        lines = [*map(json.loads, file.read_text().splitlines())]
        first = next((line['iter'] for line in lines if 'iter' in line), math.inf)
        for name in [*scalars]:
            scalars[name] = {at: value for at, value in scalars[name].items() if at < first}
        for line in lines:
            # A validation logs no iteration: it follows the line of its iteration.
            iteration = line.get('iter', iteration)
            for name, value in line.items():
                scalars.setdefault(name, {})[iteration] = value
    return {name: values for name, values in scalars.items() if values}


@styled
def training_figure(runs: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Figure:
    """Draws AP (times 100), top-1 accuracy or mIoU, and gamma, over the iterations of runs.

    Hollow markers are validations, of masks if the detector has them; a filled marker is the AP after recalibration.

    Args:
        runs: Scalars of each run, see :func:`read_scalars`, by its name.
    """
    figure = Figure(figsize=(WIDTH, 3.2))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    # mmdet logs fractions, mmpretrain and mmsegmentation per cent.
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
