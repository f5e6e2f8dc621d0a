"""Draws the picture of the README: AP over latency of the ways to be rid of LayerNorm.

    python -m benchmarks.ap_latency docs/ap_latency.svg

AP is from small detectors after 2,000 iterations on BCCD and DSB2018 (`norms_*-norms-2000.json` and
`absorb_*_2000.json` in benchmarks/results). Time is from a Mask R-CNN with Swin-T (`runtimes.json` and `gpu.json`).
Detectors without norms are one graph, so one of them gives the time of all.
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from benchmarks.norms.table import by_seed
from benchmarks.results import FOLDER, Results
from slab_det.measure.figure import COLOURS, INK, WIDTH, save_figure, styled

DATASETS = {
    'bccd': "box AP on BCCD (similar images),\nminus LayerNorm's",
    'dsb2018': "mask AP on DSB2018 (different images),\nminus LayerNorm's",
}
MACHINES = {
    'cpu': 'CPU with 2 threads, 800x1216, float32',
    'gpu': 'H100, 800x1333, float32, one CUDA graph',
}
LABELS_AT = 0.53  # between the points of both machines
NEW = dict(color=COLOURS[1], marker='o')
BEST = dict(color=COLOURS[2], marker='*', ms=13)
ABSORBED = dict(color='0.5', marker='s')
STOCK = dict(color=INK, marker='o', mfc='white')
DEPLOYED = dict(color=INK, marker='o')
LEGEND = {
    'trained with a norm that folds away': NEW,
    'trained with the recommended norm': BEST,
    'LayerNorm, absorbed after the training (norms left)': ABSORBED,
    'LayerNorm, deployed as it is': DEPLOYED,
    "LayerNorm in mmdet's own detector": STOCK,
    'from the lowest to the highest of three seeds': dict(color='0.5', marker='|', ms=12, mew=0.8),
}


class Way(NamedTuple):
    """A way to a detector with fewer norms: its label and look, where its AP stands, and its row of each machine."""

    label: str
    look: Mapping
    file: str  # of its AP, with a place for the data set
    name: str  # in this file
    control: str  # the LayerNorm detector that is subtracted, in the same file
    rows: Mapping[str, str]  # of the stored times; a machine that is missing has not run it


NORMS, ABSORB = 'norms_{}-norms-2000', 'absorb_{}_2000'
NO_NORMS = {'cpu': 'Swin-T-PRepBN', 'gpu': 'Swin-T-PRepBN'}
WAYS = (
    Way('BN+FFNBN', BEST, NORMS, 'BN+FFNBN', 'LayerNorm', {**NO_NORMS, 'cpu': 'Swin-T-BN+FFNBN'}),
    Way('BatchNorm', NEW, NORMS, 'TokenBN', 'LayerNorm', NO_NORMS),
    Way('PRepBN', NEW, NORMS, 'PRepBN, linear', 'LayerNorm', NO_NORMS),
    Way('PRepBN + FFN norm', NEW, NORMS, 'PRepBN, one more in each FFN', 'LayerNorm', NO_NORMS),
    Way(
        *('absorbed, a quarter left', ABSORBED, ABSORB, 'fewest norms', 'teacher'),
        {'cpu': 'Swin-T, absorbed, 8 of 32 kept'},
    ),
    Way(
        *('absorbed, none left', ABSORBED, ABSORB, 'all gone', 'teacher'),
        {**NO_NORMS, 'cpu': 'Swin-T, absorbed, none kept'},
    ),
)


def times(machine: str) -> dict[str, float]:
    """Time of each deployed detector over the time of mmdet's in eager mode, by its row."""
    if machine == 'gpu':
        rows = Results(FOLDER / 'gpu.json').select(part='detectors', form='graph, float32')
    else:
        rows = Results(FOLDER / 'runtimes.json').select(size='800x1216', scope='detector', form='deployed')
    return {row['name']: row['to_mmdet'] for row in rows if 'to_mmdet' in row}


def differences(dataset: str, way: Way) -> list[float]:
    """AP of each seed, 0 to 100, minus LayerNorm's with the same seed; for absorbed detectors minus their teacher's."""
    rows = Results(FOLDER / f'{way.file.format(dataset)}.json').rows
    ap, control = by_seed(rows, way.name), by_seed(rows, way.control)
    return [100 * (value - control[seed]) for seed, value in ap.items()]


def spread_labels(heights: list[float], gap: float) -> list[float]:
    """Heights near the given ones, in their order, that are at least ``gap`` apart."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = [heights[index] for index in order]
    for _ in range(200):
        for lower in range(len(placed) - 1):
            overlap = max(gap - (placed[lower + 1] - placed[lower]), 0)
            placed[lower] -= overlap / 2
            placed[lower + 1] += overlap / 2
    return [placed[order.index(index)] for index in range(len(heights))]


def draw_panel(axes: Axes, dataset: str, machine: str) -> None:
    """Draws the ways of a data set; bars reach from the lowest to the highest seed."""
    ratios = times(machine)
    axes.plot(1, 0, ls='', zorder=3, **STOCK)
    axes.plot(ratios['Swin-T, LayerNorm'], 0, ls='', zorder=3, **DEPLOYED)
    labels = [('LayerNorm', ratios['Swin-T, LayerNorm'], 0.0, DEPLOYED)]
    for way in WAYS:
        if machine in way.rows:
            values, ratio = differences(dataset, way), ratios[way.rows[machine]]
            axes.plot([ratio, ratio], [min(values), max(values)], color=way.look['color'], lw=0.8, zorder=2)
            axes.plot(ratio, mean(values), ls='', zorder=4 if way.look is BEST else 3, **way.look)
            labels.append((way.label, ratio, mean(values), way.look))
    heights = spread_labels([height for _, _, height, _ in labels], 0.7)
    for (label, ratio, height, look), place in zip(labels, heights, strict=True):
        line = dict(arrowstyle='-', color='0.7', lw=0.5, shrinkA=2, shrinkB=5)
        style = dict(color=look['color'], weight='bold' if look is BEST else None)
        # Labels end on the side of the points.
        axes.text(LABELS_AT, place, label, va='center', ha='right' if machine == 'cpu' else 'left', **style)
        axes.annotate('', (ratio, height), (LABELS_AT, place), arrowprops=line)


@styled
def draw(path: Path) -> None:
    """Draws both data sets on both machines."""
    figure = Figure(figsize=(WIDTH, 5.4))
    panels = figure.subplots(len(DATASETS), len(MACHINES), sharex=True, sharey=True)
    for line, (dataset, ylabel) in zip(panels, DATASETS.items(), strict=True):
        line[0].set_ylabel(ylabel)
        for axes, machine in zip(line, MACHINES, strict=True):
            draw_panel(axes, dataset, machine)
    for column, title in zip(panels.T, MACHINES.values(), strict=True):
        column[0].set_title(title)
        column[-1].set_xlabel("time of a Mask R-CNN with Swin-T, mmdet's = 1")
    panels[0, 0].set(xlim=(0, 1.1), ylim=(-5, 4))
    handles = [Line2D([], [], ls='', label=label, **look) for label, look in LEGEND.items()]
    figure.legend(handles=handles, loc='outside lower center', ncols=2)
    save_figure(figure, path)


if __name__ == '__main__':
    draw(Path(sys.argv[1] if len(sys.argv) > 1 else 'docs/ap_latency.svg'))
