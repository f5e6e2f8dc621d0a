"""Draws what an absorption left of each norm, and what the norms kept buy: docs/absorb.svg.

python tools/absorb.py CONFIG CHECKPOINT --out fused.pth --keep 4 --curve 0 2 4 8 --json report.json
python -m benchmarks.absorb.figure report.json docs/absorb.svg
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from slab_det.absorption import NormAbsorption
from slab_det.measure.figure import COLOURS, INK, WIDTH, limits, save_figure, styled

_ROW = 0.17  # inches: two bars and the name of a norm
_LEAST = 1e-4  # share below which nobody tells bars apart


@styled
def absorption_figure(
    norms: Sequence[NormAbsorption], agreement: Mapping[int, float], latency: Mapping[int, float]
) -> Figure:
    """Draws what share of each norm is left by the affine maps, and what the norms kept buy.

    The upper panel has a row per norm, front to back: a light bar for the best scale per channel and a dark bar for the
    map that was fitted, both of the student's input, and a tick for the best map of the teacher's input, which decides
    what is kept. The name of a norm that was kept is marked. Below stand agreement with the teacher and latency over
    the number of norms kept; hollow is the teacher, which keeps all.

    Args:
        norms: Entries of a report.
        agreement: See :func:`slab_det.measure.agreement.agreement`, by the number of norms kept.
        latency: Milliseconds, by the number of norms kept.
    """
    # Label, values, the narrowest axis and its end: agreement is an AP.
    curves = [('agreement', agreement, 0.04, 1.0)] if agreement else []
    curves += [('median latency (ms)', latency, 0.2 * max(latency.values()), math.inf)] if latency else []
    heights = [_ROW * len(norms) + 0.9, *([1.9] if curves else [])]
    figure = Figure(figsize=(WIDTH, sum(heights)))
    upper, *lower = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    _draw_bars(upper.subplots(), norms)
    if curves:
        for axes, curve in zip(lower[0].subplots(1, len(curves), squeeze=False)[0], curves, strict=True):
            _draw_curve(axes, *curve, len(norms))
    return figure


def _draw_bars(axes: Axes, norms: Sequence[NormAbsorption]) -> None:
    measured = []
    for offset, colour, label, attribute in (
        (-0.2, '0.85', 'scale per channel', 'diagonal'),
        (0.2, '0.6', 'fitted map', 'left'),
    ):
        shares = {row + offset: getattr(norm, attribute) for row, norm in enumerate(norms)}
        shares = {row: max(share, _LEAST) for row, share in shares.items() if share is not None}
        axes.barh([*shares], [*shares.values()], 0.4, color=colour, label=label)
        measured += shares.values()
    own = {row: max(norm.own, _LEAST) for row, norm in enumerate(norms) if norm.own is not None}
    axes.plot([*own.values()], [*own], '|', color=INK, ms=10, mew=2, label="not affine, of the teacher's input")
    measured += own.values()
    axes.set_xscale('log')
    # From a whole power of ten on: the axis has a labelled tick on its left.
    axes.set_xlim(left=10 ** math.floor(math.log10(min(measured, default=_LEAST)) - 0.01))
    axes.set_xlabel("share of the norm's variance that is left, on held-out images")
    names = [('kept: ' if norm.outcome == 'kept' else '') + norm.norm.removeprefix('backbone.') for norm in norms]
    axes.set_yticks(range(len(norms)), names)
    for label, norm in zip(axes.get_yticklabels(), norms, strict=True):
        if norm.outcome == 'kept':
            label.set(color=COLOURS[2], fontweight='bold')
    axes.set_ylim(len(norms) - 0.4, -0.6)
    axes.grid(visible=False, axis='y')
    axes.legend(loc='lower left', bbox_to_anchor=(0, 1), ncols=3)


def _draw_curve(
    axes: Axes, label: str, values: Mapping[int, float], min_span: float, most: float, num_norms: int
) -> None:
    """One number over the norms kept; a hollow marker is the LayerNorm detector, which keeps all."""
    kept = sorted(values)
    axes.plot(kept, [values[k] for k in kept], '-', color=INK)
    for k in kept:
        axes.plot(k, values[k], 'o', mec=INK, mfc='white' if k == num_norms else INK, clip_on=False)
    axes.set_ylim(limits([*values.values()], min_span, most))
    axes.set(xlabel=f'norms kept, of {num_norms}', ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('report', type=Path, help='what tools/absorb.py wrote with --json')
    parser.add_argument('svg', type=Path)
    args = parser.parse_args()
    report = json.loads(args.report.read_text())
    agreements = {point['num_kept']: point['agreement'] for point in report['points']}
    latencies = {point['num_kept']: point['latency']['median_ms'] for point in report['points'] if point['latency']}
    norms = [NormAbsorption(**norm) for norm in report['norms']]
    save_figure(absorption_figure(norms, {} if None in agreements.values() else agreements, latencies), args.svg)


if __name__ == '__main__':
    main()
