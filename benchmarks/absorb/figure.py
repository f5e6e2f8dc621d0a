"""Draws what absorbed detectors lose over the LayerNorms that are left in them: the picture of docs/absorb.md.

python -m benchmarks.absorb.figure docs/absorbed.svg
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from matplotlib.figure import Figure

from benchmarks.results import FOLDER, Results
from slab_det.measure.figure import COLOURS, WIDTH, save_figure, styled

NUM_NORMS = 24  # of Swin-32x2222
CURVES = {
    'bccd_2000': 'BCCD, box AP',
    'dsb2018_2000': 'DSB2018, mask AP',
    'dsb2018_4000': 'DSB2018, mask AP, twice the training',
    'animals_1000': 'photographs, box AP',
}
MARKERS = 'osD^'


def losses(rows: Sequence[dict], way: str) -> list[tuple[int, float]]:
    """Norms left and AP minus the teacher's, 0 to 100, of each seed."""
    teachers = {row['seed']: row['AP'] for row in rows if row['name'] == 'teacher'}
    return [(len(row['kept']), 100 * (row['AP'] - teachers[row['seed']])) for row in rows if row['name'] == way]


@styled
def draw(path: Path) -> None:
    """A marker for the mean of each way, and a small one for each seed; nothing was measured between the ways."""
    figure = Figure(figsize=(WIDTH, 3.2))
    axes = figure.subplots()
    for (name, label), marker, colour in zip(CURVES.items(), MARKERS, COLOURS, strict=True):
        rows = Results(FOLDER / f'absorb_{name}.json').rows
        points = [losses(rows, way) for way in ('all gone', 'fewest norms')]
        for kept, loss in sum(points, []):
            axes.plot(kept, loss, marker, ms=3, mec=colour, mfc='none', mew=0.7)
        means = [[mean(values) for values in zip(*found, strict=True)] for found in points]
        axes.plot(*zip(*means, strict=True), ls='', marker=marker, ms=7, color=colour, label=label)
    axes.axhline(0, color=COLOURS[0], lw=0.8, ls='--')
    axes.annotate('the trained detector, with all its norms', (9.9, 0), (0, 3), textcoords='offset points', ha='right')
    axes.annotate('a quarter at most', (5, 0), (5, 2.2), ha='center')
    axes.annotate('none left', (0, 0), (0, 2.2), ha='center')
    axes.set(xlim=(-1, 10), ylim=(-5, 3), xticks=range(0, 11, 2))
    axes.set(xlabel=f'LayerNorms left, of {NUM_NORMS}', ylabel='AP gained or lost by absorption')
    axes.legend(loc='lower right', title='means; small: each of three seeds')
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('figure', type=Path, metavar='FILE.svg')
    draw(parser.parse_args().figure)


if __name__ == '__main__':
    main()
