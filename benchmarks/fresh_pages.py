"""What fresh pages of memory cost a backbone: latency with freed memory kept, and as glibc has it by default.

    python benchmarks/fresh_pages.py --threads 2

What glibc was told cannot be taken back, so that the two take turns as processes, each a call of tools/latency.py; in
every second turn the other one goes first. Random weights. Written into benchmarks/results/fresh_pages.json.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import json
import os
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.experiments import ROOT, call, tool

# Config, (H, W), rounds, flags.
CASES = {
    'small Swin, 512x512': ('benchmarks/dsb2018/mask_rcnn_swin_small.py', (512, 512), 100, ()),
    'Swin-T-PRepBN fused, 800x1216': ('configs/mask_rcnn_prepbn_swin_t.py', (800, 1216), 10, ('--fuse',)),
    'Swin-T-PRepBN deployed, 800x1216': ('configs/mask_rcnn_prepbn_swin_t.py', (800, 1216), 10, ('--fuse', '--deploy')),
}


def measure(config: str, size: tuple[int, int], rounds: int, flags: tuple[str, ...], threads: int) -> dict:
    """The latency that a process of its own finds."""
    with TemporaryDirectory() as folder:
        report = Path(folder) / 'report.json'
        call(
            tool(
                'latency.py',
                config,
                '--scope',
                'backbone',
                '--size',
                *size,
                '--rounds',
                rounds,
                '--warmup',
                3,
                '--threads',
                threads,
                '--device',
                'cpu',
                '--json',
                report,
                *flags,
            )
        )
        return json.loads(report.read_text())['entries'][0]['latency']


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--turns', type=int, default=5, help='processes of each kind (default %(default)s)')
    parser.add_argument('--threads', type=int, default=2)
    args = parser.parse_args()
    os.chdir(ROOT)
    found = {}
    for name, (*case, flags) in CASES.items():
        kinds = {'default': flags, 'kept': (*flags, '--keep-memory')}
        turns = [
            {kind: measure(*case, kinds[kind], args.threads) for kind in [*kinds][:: -1 if turn % 2 else 1]}
            for turn in range(args.turns)
        ]
        ratios = [turn['kept']['median_ms'] / turn['default']['median_ms'] for turn in turns]
        pages = median(turn['default']['page_faults'] for turn in turns)
        print(
            f'{name}: kept / default {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), '
            f'{pages:.0f} pages per round by default',
            flush=True,
        )
        found[name] = dict(ratio=median(ratios), ratios=ratios, pages_by_default=pages, turns=turns)
    path = Path('benchmarks/results/fresh_pages.json')
    path.write_text(json.dumps(found, indent=1) + '\n')
    print(f'Written to {path}')


if __name__ == '__main__':
    main()
