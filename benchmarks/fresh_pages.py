"""What fresh pages of memory cost a backbone: latency with freed memory kept, and as glibc has it by default.

    python benchmarks/fresh_pages.py --threads 2

What glibc was told cannot be taken back, so that the two take turns as processes, each a call of tools/latency.py.
Random weights. Written into benchmarks/results/fresh_pages.json.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
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
        subprocess.run(
            [sys.executable, str(ROOT / 'tools/latency.py'), str(ROOT / config), '--scope', 'backbone', '--size',
             *map(str, size), '--rounds', str(rounds), '--warmup', '3', '--threads', str(threads),
             '--device', 'cpu', '--json', str(report), *flags], check=True, capture_output=True)
        return json.loads(report.read_text())['entries'][0]['latency']


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--turns', type=int, default=3, help='processes of each kind (default %(default)s)')
    parser.add_argument('--threads', type=int, default=2)
    args = parser.parse_args()
    found = {}
    for name, (*case, flags) in CASES.items():
        turns = [(measure(*case, flags, args.threads), measure(*case, (*flags, '--keep-memory'), args.threads))
                 for _ in range(args.turns)]
        ratios = [kept['median_ms'] / default['median_ms'] for default, kept in turns]
        pages = median(default['page_faults'] for default, _ in turns)
        print(f'{name}: kept / default {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), '
              f'{pages:.0f} pages per round by default', flush=True)
        found[name] = dict(ratio=median(ratios), ratios=ratios, pages_by_default=pages, turns=turns)
    path = ROOT / 'benchmarks/results/fresh_pages.json'
    path.write_text(json.dumps(found, indent=1) + '\n')
    print(f'Written to {path}')


if __name__ == '__main__':
    main()
