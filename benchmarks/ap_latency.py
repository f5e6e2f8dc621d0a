"""Draws the picture of the README: AP over latency of the ways to be rid of LayerNorm.

    python -m benchmarks.ap_latency docs/ap_latency.svg

AP is that of small detectors after 2,000 iterations on BCCD and DSB2018 (`norms_*-norms-2000.json` and
`absorb_*_2000.json` in benchmarks/results). Time is that of the same way in a Mask R-CNN with Swin-T: `runtimes.json`
and `gpu.json`. Detectors without norms are one graph, so one of them gives the time of all.
"""

import argparse
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
    'bccd': 'box AP on BCCD (images alike),\nminus that of LayerNorm',
    'dsb2018': 'mask AP on DSB2018 (images differ),\nminus that of LayerNorm',
}
MACHINES = {
    'cpu': 'CPU with 2 threads, 800x1216, float32',
    'gpu': 'H100, 800x1333, float32, one CUDA graph',
}
RECOMMENDED = 'BN+FFNBN'
LABELS_END = {'cpu': 'right', 'gpu': 'left'}  # the side of a label that faces the points
LABELS_AT = 0.53  # between the points of both machines
NEW = dict(color=COLOURS[1], marker='o')
BEST = dict(color=COLOURS[2], marker='*', ms=13)
ABSORBED = dict(color='0.5', marker='s')
LEGEND = {
    'trained with a norm that folds away': NEW,
    'trained with the recommended norm': BEST,
    'LayerNorm, absorbed after the training (norms left)': ABSORBED,
    'LayerNorm, deployed as it is': dict(color=INK, marker='o'),
    "LayerNorm in mmdet's own detector": dict(color=INK, marker='o', mfc='white'),
    'from the lowest to the highest of three seeds': dict(color='0.5', marker='|', ms=12, mew=0.8),
}


class Way(NamedTuple):
    """A way to a detector with fewer norms.

    Attributes:
        label: In the picture.
        file: Of its AP, without the data set: 'norms' or 'absorb'.
        name: Its name in this file.
        control: Name of the LayerNorm detector that is subtracted, in the same file.
        rows: Its row of the stored times, by machine; a machine that is missing has not run it.
    """

    label: str
    file: str
    name: str
    control: str
    rows: Mapping[str, str]


NO_NORMS = {'cpu': 'Swin-T-PRepBN', 'gpu': 'Swin-T-PRepBN'}
WAYS = (
    Way(RECOMMENDED, 'norms', 'BN+FFNBN', 'LayerNorm', {**NO_NORMS, 'cpu': 'Swin-T-BN+FFNBN'}),
    Way('BatchNorm', 'norms', 'TokenBN', 'LayerNorm', NO_NORMS),
    Way('PRepBN', 'norms', 'PRepBN, linear', 'LayerNorm', NO_NORMS),
    Way('PRepBN + FFN norm', 'norms', 'PRepBN, one more in each FFN', 'LayerNorm', NO_NORMS),
    Way('absorbed, a quarter left', 'absorb', 'default', 'teacher', {'cpu': 'Swin-T, absorbed, 8 of 32 kept'}),
    Way('absorbed, none left', 'absorb', 'all gone', 'teacher', {**NO_NORMS, 'cpu': 'Swin-T, absorbed, none kept'}),
)


def times(machine: str) -> dict[str, float]:
    """Time of each deployed detector over mmdet's eager one, by its row."""
    if machine == 'gpu':
        rows = Results(FOLDER / 'gpu.json').select(part='detectors', form='graph, float32')
    else:
        rows = Results(FOLDER / 'runtimes.json').select(size='800x1216', scope='detector', form='deployed')
    return {row['name']: row['to_mmdet'] for row in rows if 'to_mmdet' in row}


def differences(dataset: str, way: Way) -> list[float]:
    """AP of each seed, 0 to 100, minus that of LayerNorm with the same seed; for an absorbed detector, its teacher."""
    name = {'norms': f'norms_{dataset}-norms-2000', 'absorb': f'absorb_{dataset}_2000'}[way.file]
    rows = Results(FOLDER / f'{name}.json').rows
    ap, control = by_seed(rows, way.name), by_seed(rows, way.control)
    return [100 * (value - control[seed]) for seed, value in ap.items()]


def spread_labels(heights: list[float], gap: float) -> list[float]:
    """Heights near the given ones, in their order, that are at least ``gap`` apart."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    placed = [heights[index] for index in order]
    for _ in range(200):
        for lower in range(len(placed) - 1):
            overlap = gap - (placed[lower + 1] - placed[lower])
            if overlap > 0:
                placed[lower] -= overlap / 2
                placed[lower + 1] += overlap / 2
    return [placed[order.index(index)] for index in range(len(heights))]


def draw_panel(axes: Axes, dataset: str, machine: str) -> None:
    """Draws the ways of a data set; bars reach from the lowest to the highest seed."""
    ratios = times(machine)
    axes.plot(1, 0, ls='', zorder=3, **LEGEND["LayerNorm in mmdet's own detector"])
    axes.plot(ratios['Swin-T, LayerNorm'], 0, ls='', zorder=3, **LEGEND['LayerNorm, deployed as it is'])
    labels = [('LayerNorm', ratios['Swin-T, LayerNorm'], 0.0, INK)]
    for way in WAYS:
        if machine not in way.rows:
            continue
        values, ratio = differences(dataset, way), ratios[way.rows[machine]]
        look = BEST if way.label == RECOMMENDED else NEW if way.file == 'norms' else ABSORBED
        axes.plot([ratio, ratio], [min(values), max(values)], color=look['color'], lw=0.8, zorder=2)
        axes.plot(ratio, mean(values), ls='', zorder=4 if look is BEST else 3, **look)
        labels.append((way.label, ratio, mean(values), look['color']))
    heights = spread_labels([height for _, _, height, _ in labels], 0.7)
    for (label, ratio, height, colour), place in zip(labels, heights, strict=True):
        line = dict(arrowstyle='-', color='0.7', lw=0.5, shrinkA=2, shrinkB=5)
        look = dict(color=colour, weight='bold' if label == RECOMMENDED else None)
        axes.text(LABELS_AT, place, label, va='center', ha=LABELS_END[machine], **look)
        axes.annotate('', (ratio, height), (LABELS_AT, place), arrowprops=line)


@styled
def draw(path: Path) -> None:
    """Draws both data sets on both machines."""
    figure = Figure(figsize=(WIDTH, 5.4))
    panels = figure.subplots(len(DATASETS), len(MACHINES), sharex=True, sharey=True)
    for line, (dataset, ylabel) in zip(panels, DATASETS.items(), strict=True):
        for axes, (machine, title) in zip(line, MACHINES.items(), strict=True):
            draw_panel(axes, dataset, machine)
            if axes in panels[0]:
                axes.set_title(title)
            if axes in panels[-1]:
                axes.set_xlabel("time of a Mask R-CNN with Swin-T, mmdet's = 1")
            if axes in line[:1]:
                axes.set_ylabel(ylabel)
    panels[0, 0].set(xlim=(0, 1.1), ylim=(-5, 4))
    handles = [Line2D([], [], ls='', label=label, **look) for label, look in LEGEND.items()]
    figure.legend(handles=handles, loc='outside lower center', ncols=2)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('figure', type=Path, metavar='FILE.svg')
    draw(parser.parse_args().figure)


if __name__ == '__main__':
    main()
