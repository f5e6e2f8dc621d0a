"""Compares this commit's speed, as ratios to mmdet in the same process, with ratios stored before. Only reports.

    python -m benchmarks.speed_check --threads 2            # this commit / stored
    python -m benchmarks.speed_check --threads 2 --store    # makes this commit's ratios the stored ones

Ratios are compared where device, threads, size and dtype are the same; for anything else nothing is stored yet.
"""

import argparse
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.untrained import build_untrained
from slab_det.cli import run_cli
from slab_det.measure.environment import library_versions
from slab_det.measure.latency import LatencyResult, describe_scope, measure_latency, repeat_ratios

ROOT = Path(__file__).resolve().parents[1]
STOCK = {'type': 'SwinTransformer'}


class Check(NamedTuple):
    """Models that are measured together, config and changes of the backbone by name; ratios are to the first."""

    scope: str
    size: tuple[int, int] | None  # (height, width); None takes that of the command line
    models: Mapping[str, tuple[str, Mapping]]


CHECKS = (
    Check('backbone', None, {
        'Swin-T, mmdet': ('mask_rcnn_swin_t', STOCK),
        'Swin-T-PRepBN, fused': ('mask_rcnn_prepbn_swin_t', {}),
        'SLAB-Swin-T, fused': ('mask_rcnn_slab_swin_t', {}),
    }),
    Check('detector', (160, 192), {
        'quick start, mmdet': ('quickstart_mask_rcnn_swin', STOCK),
        'quick start, SLAB fused': ('quickstart_mask_rcnn_slab_swin', {}),
    }),
)  # fmt: skip


def measure(check: Check, args: argparse.Namespace) -> list[LatencyResult]:
    models = {
        name: build_untrained(ROOT / 'configs' / f'{config}.py', backbone)
        for name, (config, backbone) in check.models.items()
    }
    options = {name: getattr(args, name) for name in ('rounds', 'repeat', 'device', 'threads')}
    size = check.size or tuple(args.size)
    results = measure_latency(models, size=size, warmup=1, scope=check.scope, progress=True, **options)
    return list(results.values())


def ratios(results: Sequence[LatencyResult]) -> dict[str, dict[str, float]]:
    """Each model over the first: the median of the repeats, and their range."""
    first, *others = results
    found = {other.name: repeat_ratios(other, first) for other in others}
    return {name: {'ratio': median(r), 'low': min(r), 'high': max(r)} for name, r in found.items()}


def report(name: str, here: Mapping[str, float], stored: Mapping[str, float] | None) -> str:
    """One row: this commit's ratio with its range, the stored one, and the first over the second."""
    cells = [name, *(f'{r["ratio"]:.3f} ({r["low"]:.3f} – {r["high"]:.3f})' if r else '–' for r in (here, stored))]
    cells.append(f'{here["ratio"] / stored["ratio"]:.3f}' if stored else '–')
    return f'| {" | ".join(cells)} |'


def commit() -> str:
    """The commit of this tree, with a mark where it was changed since."""
    command = ['git', 'describe', '--always', '--dirty', '--exclude', '*']
    if shutil.which('git') is None:
        return 'unknown'
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or 'unknown'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', type=int, nargs=2, default=(800, 1216), metavar=('H', 'W'), help='of the backbones')
    parser.add_argument('--rounds', type=int, default=5, help='(default %(default)s)')
    parser.add_argument('--repeat', type=int, default=3, help='whole measurements (default %(default)s)')
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument('--device', default='cpu')
    parser.add_argument(
        '--file', type=Path, default=ROOT / 'benchmarks' / 'results' / 'speed_check.json', help='the stored ratios'
    )
    parser.add_argument('--store', action='store_true', help="store this commit's ratios")
    args = parser.parse_args()
    stored = json.loads(args.file.read_text()) if args.file.exists() else {}
    for check in CHECKS:
        results = measure(check, args)
        scope, here = describe_scope(results[0].to_dict()), ratios(results)
        before = stored.get(scope, {'ratios': {}})
        print(
            f'\n{scope}, over {results[0].name} at {results[0].median_ms:.1f} ms\n\n'
            f'| model | this commit ({commit()}) | stored ({before.get("commit", "nothing yet")}) '
            '| this commit / stored |\n|---|---:|---:|---:|'
        )
        for name, ratio in here.items():
            print(report(name, ratio, before['ratios'].get(name)))
        if args.store:
            stored[scope] = {
                'commit': commit(),
                'ratios': here,
                'base': results[0].name,
                'base_ms': results[0].median_ms,
                'rounds': args.rounds,
                'repeats': args.repeat,
                'versions': library_versions(),
            }
    if args.store:
        args.file.parent.mkdir(parents=True, exist_ok=True)
        args.file.write_text(json.dumps(stored, indent=1) + '\n')
        print(f'\nWritten to {args.file}')


if __name__ == '__main__':
    run_cli(main)
