"""Stores what `slab-det optimize` measured for the picture of README.md: a detector on BCCD.

python -m benchmarks.absorb.run bccd --iterations 600 --seeds 0 --ways --data-root data/bccd
slab-det optimize CONFIG CHECKPOINT --images data/bccd/images/train --out work_dirs/bccd --minutes 4 --eval
python -m benchmarks.optimize work_dirs/bccd
"""

import argparse
import json
from pathlib import Path

from benchmarks.results import FOLDER, Results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, help='of optimize')
    parser.add_argument('--out', type=Path, default=FOLDER / 'optimize_bccd.json')
    args = parser.parse_args()
    content = json.loads((args.folder / 'optimize.json').read_text())
    results = Results(args.out, detector='Faster R-CNN, Swin-32x2222, BCCD', sizes=content['images']['sizes'])
    names = ('ratio', 'quartiles', 'median_ms', 'rounds', 'agreement', 'expected_loss', 'detections')
    for entry in content['forms']:
        values = {name: entry[name] for name in names} | {'threads': content['threads']}
        if entry['ap']:
            values['AP'] = entry['ap']['bbox']['AP']
        results.add(dict(name=entry['title']), values | {'recommended': entry['key'] == content['recommended']})


if __name__ == '__main__':
    main()
