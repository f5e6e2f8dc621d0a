"""Stores what `slab-det optimize` measured of a detector on BCCD, and draws the picture of README.md from the rows.

python -m benchmarks.absorb.run bccd --iterations 600 --seeds 0 --ways --data-root data/bccd
slab-det optimize CONFIG CHECKPOINT --images data/bccd/images/train --out work_dirs/bccd --minutes 4 --eval
python -m benchmarks.optimize work_dirs/bccd
python -m benchmarks.optimize FOLDER --detector 'Mask R-CNN, Swin-T' --out benchmarks/results/optimize_full.json
python -m benchmarks.optimize FOLDER --detector 'Mask R-CNN, hard' --out benchmarks/results/optimize_hard_320.json
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.results import FOLDER, ROOT, Results
from slab_det.common.record import format_ratio, format_table
from slab_det.measure.figure import save_figure
from slab_det.optimization.pictures import loss_figure
from slab_det.precisions import RUNTIMES

PICTURED = FOLDER / 'optimize_bccd.json'
COPIED = (
    *('ratio', 'quartiles', 'median_ms', 'rounds', 'tie'),
    *('retained_ap', 'loss_range', 'expected_loss', 'detections'),
)


def store(folder: Path, detector: str, out: Path) -> None:
    """Writes the forms of a folder of optimize to a file of results, in place of those of an earlier folder."""
    content = json.loads((folder / 'optimize.json').read_text())
    setting = dict(sizes=content['images']['sizes'], max_loss=content['max_loss'])
    results = Results(out, detector=detector, **setting)
    out.unlink(missing_ok=True)
    results.environments, results.rows = [], []
    for entry in content['forms']:
        values = {name: entry[name] for name in COPIED} | {'threads': content['threads']}
        if entry['ap']:
            values['AP'] = entry['ap']['bbox']['AP']
            values |= {f'{kind}_AP': found['AP'] for kind, found in entry['ap'].items() if kind != 'bbox'}
        values |= dict(dropped=bool(entry['dropped_for']), recommended=entry['key'] == content['recommended'])
        results.add(dict(name=entry['title']), values)


def table(rows: Sequence[dict]) -> str:
    """Time and AP of every form, the fastest first; times are ratios times the median of eager."""
    (base,) = (row['median_ms'] for row in rows if row['name'] == 'eager')
    titles = dict(AP='box AP', segm_AP='mask AP')
    keys = {key: title for key, title in titles.items() if any(key in row for row in rows)}
    lines = [
        (
            f'**{row["name"]}**' if row['recommended'] else row['name'],
            f'{base * row["ratio"]:,.0f}',
            format_ratio(row['ratio'], row['quartiles']) if row['name'] != 'eager' else '1',
            f'{row["retained_ap"]:.1%}' if row['name'] != 'eager' else '–',
            *(f'{100 * row[key]:.1f}' if key in row else '–' for key in keys),
        )
        for row in sorted(rows, key=lambda row: row['ratio'])
    ]
    return format_table(('form', 'ms', 'of the time of eager', 'AP retained', *keys.values()), lines)


def draw(results: Results, path: Path) -> None:
    """Draws rows, which have titles in place of the keys of an optimize.json."""
    keys = {runtime.title: key for key, runtime in RUNTIMES.items()}
    forms = []
    for row in results.rows:
        title, precision, *_ = [*row['name'].split(', '), 'float32']
        look = dict(runtime=keys[title], precision=precision, dropped_for=row['dropped'], variant=[])
        forms.append(dict(row, key=row['name'], title=row['name'], **look))
    (recommended,) = (row['name'] for row in results.rows if row['recommended'])
    (base,) = results.select(name='eager')
    content = dict(forms=forms, recommended=recommended, max_loss=results.setting['max_loss'], ap=base['AP'])
    save_figure(loss_figure(content), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, help='of optimize')
    parser.add_argument('--detector', default='Faster R-CNN, Swin-32x2222, BCCD')
    parser.add_argument('--out', type=Path, default=PICTURED)
    args = parser.parse_args()
    store(args.folder, args.detector, args.out)
    if args.out == PICTURED:
        draw(Results(args.out), ROOT / 'docs' / 'optimize.svg')


if __name__ == '__main__':
    main()
