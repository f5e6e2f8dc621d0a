"""The picture of a study: AP, loss, gamma and drift over iterations, one row per setting."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import ScalarFormatter

from slab_det.measure.figures.labels import FONT_SIZE, wrap
from slab_det.measure.figures.series import Style, style_of

_WIDTH = 7.2  # inches: the text width of A4
# What the panels beside AP show; only those are drawn that a run of the study logged.
_PANELS = {
    'loss': 'training loss',
    'gamma': 'gamma',
    'un_filtered': 'share filtered by UN',
    # Means are 0 in UN, MABN and PowerNorm.
    'drift_log_var': 'drift of log variance',
}


def draw(results: Mapping, path: Path) -> None:
    """Draws the mean over seeds as a thick line and each seed as a thin one.

    The last AP of a run is the one after recalibration, where there is one. Where all runs of a setting were
    validated only at their end, they stand side by side. A run that failed has only its loss.
    """
    runs = {
        name: run
        for name, run in results['runs'].items()
        if any(result.get('training', {}).get('iteration') for result in run['seeds'].values())
    }
    if not runs:
        return
    # Runs of one name in several settings look alike.
    labels = list(dict.fromkeys(run['label'] for run in runs.values()))
    settings = list(dict.fromkeys(run['setting'] for run in runs.values()))
    panels = {
        setting: _panels([run for run in runs.values() if run['setting'] == setting], len(settings) > 2)
        for setting in settings
    }
    heights = [max(2.4, 1.4 * len(names) + 0.3) for names in panels.values()]
    figure = Figure(figsize=(_WIDTH, sum(heights) + 0.2 * -(-len(labels) // 3) + 0.4), dpi=200, layout='constrained')
    FigureCanvasAgg(figure)
    seeds = sorted({int(seed) for run in runs.values() for seed in run['seeds']})
    figure.suptitle(wrap(f'{results["setting"]}; seeds {", ".join(map(str, seeds))}', 100), fontsize=FONT_SIZE)
    rows = figure.subfigures(len(settings), 1, squeeze=False, height_ratios=heights)[:, 0]
    for row, setting in zip(rows, settings, strict=True):
        row.suptitle(setting, fontsize=FONT_SIZE)
        members = [run for run in runs.values() if run['setting'] == setting]
        axes = row.subplot_mosaic([['ap', name] for name in panels[setting]], width_ratios=[1.9, 1])
        curves = [
            [_ap_curve(result) for result in run['seeds'].values() if result['status'] == 'finished'] for run in members
        ]
        # Where no run of a setting finished, there are none.
        are_points = {len(curve) for of_run in curves for curve in of_run} == {1}
        for index, (run, of_run) in enumerate(zip(members, curves, strict=True)):
            style = style_of(run['label'], labels)
            if are_points:
                _draw_points(axes['ap'], index, [ap for curve in of_run for ap in curve.values()], style)
            else:
                _draw_lines(axes['ap'], of_run, style, 4)
            for name in panels[setting]:
                _draw_lines(
                    axes[name], [_curve(result['training'], name) for result in run['seeds'].values()], style, 0
                )
        _dress(axes['ap'], f'{results["metric"]} on validation images')
        if are_points:
            axes['ap'].set_xlabel('run: each seed, and their mean', fontsize=FONT_SIZE)
            axes['ap'].set_xticks([])
        for name in panels[setting]:
            _dress(axes[name], _PANELS[name])
        # The first iterations would flatten the rest.
        axes['loss'].set_yscale('log', subs=[1.5, 2, 3, 5])
        axes['loss'].yaxis.set_minor_formatter(ScalarFormatter())
        axes['loss'].yaxis.set_major_formatter(ScalarFormatter())
    handles = [
        Line2D([], [], color=style.colour, linestyle=style.dashes, marker=style.marker, ms=4, label=label)
        for label in labels
        for style in [style_of(label, labels)]
    ]
    figure.legend(
        handles=handles, loc='outside lower center', ncols=3, fontsize=FONT_SIZE, frameon=False, handlelength=4
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _panels(members: Sequence[Mapping], only_loss: bool) -> list[str]:
    """What these runs logged; with many settings, whose gammas are alike, the loss alone."""
    logged = {name for run in members for result in run['seeds'].values() for name in result['training']}
    return ['loss'] if only_loss else [name for name in _PANELS if name in logged]


def _ap_curve(result: Mapping) -> dict[int, float]:
    curve = dict(zip(result['validations']['iteration'], result['validations']['ap'], strict=True))
    if curve:
        curve[max(curve)] = result['ap']
    return curve


def _curve(training: Mapping, name: str) -> dict[int, float]:
    return {
        iteration: value
        for iteration, value in zip(training['iteration'], training.get(name, []), strict=False)
        if value is not None
    }


def _draw_lines(axes: Axes, curves: Sequence[Mapping[int, float]], style: Style, marker_size: float) -> None:
    """Curves over iterations, thin, and their mean at the iterations that all have."""
    curves = [curve for curve in curves if curve]
    if not curves:
        return
    if len(curves) > 1:
        for curve in curves:
            axes.plot(*zip(*curve.items(), strict=True), color=style.colour, linewidth=0.5, alpha=0.4)
    shared = sorted(set.intersection(*(set(curve) for curve in curves)))
    axes.plot(
        shared,
        [statistics.mean(curve[i] for curve in curves) for i in shared],
        color=style.colour,
        linestyle=style.dashes,
        linewidth=1.3,
        marker=style.marker if marker_size else None,
        ms=marker_size,
    )


def _draw_points(axes: Axes, x: float, values: Sequence[float], style: Style) -> None:
    """Values that belong to no iteration, above each other, small, and their mean."""
    if values:
        axes.plot([x] * len(values), values, color=style.colour, linestyle='', marker=style.marker, ms=3, alpha=0.5)
        axes.plot([x], [statistics.mean(values)], color=style.colour, linestyle='', marker=style.marker, ms=7)


def _dress(axes: Axes, label: str) -> None:
    axes.set_xlabel('iteration', fontsize=FONT_SIZE)
    axes.set_ylabel(label, fontsize=FONT_SIZE)
    axes.tick_params(labelsize=FONT_SIZE, which='both')
    axes.grid(color='0.9', linewidth=0.6)
    axes.set_axisbelow(True)
