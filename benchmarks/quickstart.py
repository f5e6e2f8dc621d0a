"""Stores what a quick start found, and prints the table of README.md.

    make quickstart
    python -m benchmarks.quickstart

Only AP is stored: a quick start runs on machines that do other things, too.
"""

import argparse
from pathlib import Path

from benchmarks.results import FOLDER, Results
from slab_det.cli.quickstart import MODELS
from slab_det.common.record import format_table
from slab_det.measure.report_file import read_report


def table(results: Results) -> str:
    """The table of README.md."""
    rows = [
        (row['name'], str(row['norms_left']), *(f'{100 * row[kind]:.1f}' for kind in ('bbox', 'segm')))
        for row in results.rows
    ]
    return format_table(('model', 'norms left', 'box AP', 'mask AP'), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/quickstart'), help='of the quick start')
    parser.add_argument('--out', type=Path, default=FOLDER / 'quickstart.json')
    args = parser.parse_args()
    entries = {entry.name: entry for entry in read_report(args.work_dir / 'report.json')}
    first = entries[MODELS[0]]
    results = Results(args.out, images=first.dataset['images'], **first.training)
    for name in MODELS:
        ap = {kind: entries[name].ap[kind]['AP'] for kind in ('bbox', 'segm')}
        results.add(dict(name=name), dict(norms_left=entries[name].latency['cost']['norms_left'], **ap))
    print(table(results))


if __name__ == '__main__':
    main()
